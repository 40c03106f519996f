from lightning_dist._version import __version__
from lightning_dist.integrations.ddp import compress_ddp
