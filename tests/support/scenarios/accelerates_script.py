"""``accelerate test`` with every Accelerator under the plugin."""

import faulthandler
from typing import Any

faulthandler.dump_traceback_later(200, exit=True)

from accelerate.test_utils.scripts import test_script  # noqa: E402

from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin  # noqa: E402

steps: list[int] = []


class Tested(Accelerator):
    """Accelerate's, whatever the script gives, and the plugin."""

    def __init__(self, *args: Any, kwargs_handlers: Any = None, **kwargs: Any) -> None:
        handlers = [*(kwargs_handlers or []), CompressedDDPPlugin("none")]
        super().__init__(*args, kwargs_handlers=handlers, **kwargs)

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        steps.extend(stats["steps"] for stats in self.compression.comm_stats())
        return super().prepare_model(*args, **kwargs)

    def unwrap_model(self, *args: Any, **kwargs: Any) -> Any:
        steps.extend(stats["steps"] for stats in self.compression.comm_stats())
        return super().unwrap_model(*args, **kwargs)


test_script.Accelerator = Tested
test_script.main()
assert sum(steps) > 0, "our hook has never run"
print(f"steps of ours: {sum(steps)}", flush=True)
