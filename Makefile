# make install   environment in .venv        make demo   train with and without compression, compare
# make test      the fast tests, minutes       make test-all   what CI runs, with whole jobs
# make test-exhaustive  the rest: every law with every codec, campaigns, every size of a page
# make test-triton   the kernels for GPUs, in Triton's interpreter    make test-gpu   on a GPU
# make gpu-check  what holds on a GPU, in eight minutes, with what is installed
# make test-lowest   some tests, with the lowest versions of dependencies
# make test-recovery  recovery within the process, with a torch that has it
# make test-versions  features with every torch, Lightning and Accelerate that is admitted: long
# make soak      random faults in trainings that recover, with SEED, TRIALS and ADAPTER
# make lint      style                        make types   mypy
# make bench     all measurements (root)      make tables     their tables in README.md and docs/
# make docs      the documents as a site in site/, or SITE=folder
# make figures   the pictures of a profile in docs/figures/ (root, Chromium)
# make build     sdist and wheel in dist/             make clean

PYTHON ?= python3
BIN := .venv/bin
LOWEST := .venv/lowest
TRITON := .venv/triton
RECOVERY := .venv/recovery
# For two cores: tests wait for their processes for half of the time (tests/runner/slots.py bounds those).
WORKERS ?= 4
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SITE ?= site
SEED ?= 1
TRIALS ?= 250
ADAPTER ?= trainer
SOAK ?= soak_out/$(ADAPTER)-$(SEED).json
OUTER := outer_lr=0.7,outer_momentum=0.6

# Rewriting the assertions of all tests takes longer than many of them: keep what was compiled.
export PYTHONDONTWRITEBYTECODE =

.PHONY: install test test-all test-exhaustive test-triton test-gpu gpu-check test-lowest test-recovery test-versions check-install soak demo lint types docs bench \
  tables figures build clean

# An environment that was made in part is none.
.DELETE_ON_ERROR:

install: .venv/installed

# Compiling 15,000 files takes a minute; those that are used are compiled when they are imported.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

test: install
	$(BIN)/python -m pytest $(PARALLEL)

# In one run: while a test of a whole job waits for its processes, others use the cores. Tests that
# fail run once more, alone.
test-all: install
	$(BIN)/python -m tests.runner.rerun_failed test_out/all $(PARALLEL) -m "not exhaustive"

test-exhaustive: $(TRITON)/installed $(RECOVERY)/installed
	$(TRITON)/bin/python -m tests.runner.rerun_failed test_out/exhaustive $(PARALLEL) -m exhaustive
	$(recovering) -m tests.runner.rerun_failed test_out/recovery $(PARALLEL) -m exhaustive $(RECOVERY_TESTS)

test-gpu: install
	$(BIN)/python -m pytest -m gpu

# With the Python and the packages of this machine: PYTHON=..., nothing is installed.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check --json benchmarks/results/gpu_check.json --page gpu_check.md

# An environment with packages of its own, which finds those of .venv beside them.
define beside
	$(PYTHON) -m venv --clear --without-pip $(1)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tested.pth
	$(1)/bin/python -m pip install --quiet --no-deps --ignore-installed $(2)
	touch $(1)/installed
endef

$(LOWEST)/installed: .venv/installed constraints-lowest.txt
	$(call beside,$(LOWEST),-r constraints-lowest.txt)

$(TRITON)/installed: .venv/installed
	$(call beside,$(TRITON),triton==3.9.0)

# torch for CPUs does not bring Triton, and with torch for CUDA its version is torch's.
test-triton: $(TRITON)/installed
	$(TRITON)/bin/python -m tests.runner.rerun_failed test_out/triton -n 2 -m "not exhaustive" tests/kernels \
	  tests/simulated_device/test_cases.py::test_cases[ci-cases_tables.py] \
	  tests/documents/test_documents.py::test_blocks_run_on_two_ranks[write-your-own-codec]

test-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m tests.runner.rerun_failed test_out/lowest -n 0 -m "not exhaustive" \
	  $(addprefix tests/,base/test_private_names.py cli/test_profile_command.py profiling/report/test_page.py \
	  elastic/recovery/test_recovery_refusals.py elastic/loop/test_loop.py::test_later_starts_go_on_to_the_same_end) \
	  $(addprefix tests/frameworks/,test_wrong_strategy.py lightning/elastic/test_elastic_resume.py \
	  lightning/checkpoint/test_async_checkpoint_files.py) \
	  $(addprefix tests/frameworks/accelerate/test_,accelerate_state.py trainer_mixin.py \
	  accelerate_programs.py::test_the_trainer_example_resumes_bit_for_bit) \
	  tests/documents/test_documents.py::test_blocks_run_on_two_ranks[accelerate]

# PyPI has no torch for CPUs alone, so the libraries of CUDA have stand-ins.
$(RECOVERY)/installed: .venv/installed
	$(call beside,$(RECOVERY),torch==2.14.1)
	$(BIN)/python -m tests.campaigns.versions.stand_ins $(RECOVERY)

recovering = LD_LIBRARY_PATH=$(CURDIR)/$(RECOVERY)/stand-ins $(RECOVERY)/bin/python
RECOVERY_TESTS := $(addprefix tests/,elastic/recovery elastic/launcher/test_endings.py elastic/loop/test_loop_hangs.py \
  elastic/loop/test_loop.py::test_settings_that_could_not_take_effect \
  frameworks/lightning/test_trainer_recovery.py frameworks/test_wrong_strategy.py \
  documents/test_documents.py::test_blocks_recover_on_two_ranks)

test-recovery: $(RECOVERY)/installed
	$(recovering) -m tests.runner.rerun_failed test_out/recovery $(PARALLEL) -m "not exhaustive" $(RECOVERY_TESTS)

# One environment at a time; a torch is up to 0.9 GB to fetch.
test-versions: install
	$(BIN)/python -m tests.campaigns.versions --json benchmarks/results/versions.json

# Whether what the tests ran with is what `install` brings, and nothing else.
check-install: install
	$(BIN)/python -m tests.runner.installed

soak: $(RECOVERY)/installed
	$(recovering) -m tests.campaigns.in_process --adapter $(ADAPTER) --trials $(TRIALS) --seed $(SEED) \
	  --json $(SOAK)

demo: install
	$(BIN)/python examples/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

docs: install # not --quiet: --strict would not see warnings
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir $(abspath $(SITE))

bench: install
	$(BIN)/python -m benchmarks.codecs --json benchmarks/results/codecs.json
	$(BIN)/python -m benchmarks.step_time codecs --json benchmarks/results/allreduce.json
	$(BIN)/python -m benchmarks.step_time forms --json benchmarks/results/hierarchical.json
	$(BIN)/python -m benchmarks.step_time fsdp --json benchmarks/results/fsdp_gpt.json
	$(BIN)/python -m benchmarks.step_time fsdp --model linear --json benchmarks/results/fsdp.json
	$(BIN)/python -m benchmarks.profiler.whatif local --json benchmarks/results/local_throughput.json
	$(BIN)/python -m benchmarks.profiler.whatif codecs --json benchmarks/results/whatif.json
	$(BIN)/python -m benchmarks.profiler.whatif fsdp --json benchmarks/results/whatif_fsdp.json
	$(BIN)/python -m benchmarks.convergence --json benchmarks/results/convergence.json
	$(BIN)/python -m benchmarks.convergence --steps 480 --seeds 3 --ranks 2 --task gpt --codec none \
	  --codec sign --codec powersgd:two_phase=true --json benchmarks/results/convergence_long.json
	$(BIN)/python -m benchmarks.convergence --steps 800 --ranks 2 --task gpt --codec delay/int8 \
	  --json benchmarks/results/convergence_delay.json
	$(BIN)/python -m benchmarks.convergence --ranks 4 --task gpt --codec fsdp/native-hsdp \
	  $(addprefix --codec fsdp/,none bf16 int8 int4 sign terngrad) \
	  --json benchmarks/results/convergence_fsdp.json
	$(BIN)/python -m benchmarks.convergence --steps 800 --ranks 2 --task gpt \
	  --codec local_sgd@8/int8 --codec diloco@8:$(OUTER)/int8 --codec diloco@8:$(OUTER)/int4 \
	  --codec diloco@16:$(OUTER)/int8 --codec diloco@8:outer_lr=0.7,outer_momentum=0.9/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=0,$(OUTER),mixing=0/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=1,$(OUTER),mixing=0/int8 \
	  --json benchmarks/results/convergence_local.json
	$(BIN)/python -m benchmarks.convergence --steps 800 --ranks 2 --task gpt \
	  --codec streaming@16:fragments=4,overlap_steps=3/int8 \
	  --codec diloco@16:overlap_steps=6/int8 --codec sparseloco@4 \
	  --json benchmarks/results/convergence_local_overlap.json
	$(BIN)/python -m benchmarks.convergence --steps 1600 --ranks 2 --task gpt \
	  --codec diloco@16:$(OUTER)/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=1,$(OUTER),mixing=0/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=3/int8 \
	  --json benchmarks/results/convergence_local_long.json
	$(BIN)/python -m benchmarks.convergence --steps 1600 --lr 0.0042 --ranks 2 --task gpt \
	  --codec diloco@16:$(OUTER)/int8 --json benchmarks/results/convergence_local_long_tuned.json
	$(BIN)/python -m benchmarks.convergence --steps 800 --lr 0.0042 --ranks 2 --task gpt \
	  --codec 'local_sgd@4/int8*1.4' --codec 'local_sgd@8/int8*1.4' \
	  --json benchmarks/results/convergence_local_tuned.json
	$(BIN)/python -m benchmarks.convergence.time_to_accuracy \
	  --json benchmarks/results/time_to_accuracy.json
	$(BIN)/python -m benchmarks.convergence.time_to_accuracy --seeds 1 --every 16 --codec int8 \
	  --codec delay/int8 --codec delay/int4 --json benchmarks/results/delay.json
	$(BIN)/python -m benchmarks.convergence.time_to_accuracy --link 50 --seeds 1 --steps 32 \
	  --every 16 --codec int4 --codec diloco@16:$(OUTER)/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=2,$(OUTER),mixing=0/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=3,$(OUTER),mixing=0/int4 \
	  --json benchmarks/results/local_steps.json
	$(BIN)/python -m benchmarks.convergence.time_to_accuracy --seeds 2 --every 16 --codec int4 \
	  --codec terngrad --codec diloco@8:$(OUTER)/int8 --codec diloco@16:$(OUTER)/int8 \
	  --codec streaming@16:fragments=4,overlap_steps=2,$(OUTER),mixing=0/int8 \
	  --json benchmarks/results/local_steps_100.json
	$(BIN)/python -m benchmarks.checkpoint --json benchmarks/results/checkpoint.json
	$(BIN)/python -m tests.campaigns.checkpoint_crash --trials 1000 \
	  --json benchmarks/results/crash_campaign.json
	$(BIN)/python -m tests.campaigns.restart_faults --trials 300 \
	  --json benchmarks/results/faults_restart.json
	$(BIN)/python -m tests.campaigns.restart_faults --trainer loop --trials 150 \
	  --json benchmarks/results/faults_restart_loop.json
	$(BIN)/python -m benchmarks.restart.resume --json benchmarks/results/restart_resume.json
	$(BIN)/python -m benchmarks.restart.rendezvous --trials 17 --stock 6 \
	  --json benchmarks/results/restart_rendezvous.json
	$(BIN)/python -m benchmarks.restart.in_process --json benchmarks/results/restart_in_process.json
	$(BIN)/python -m benchmarks.restart.overhead --json benchmarks/results/elastic_overhead.json
	$(BIN)/python -m benchmarks.profiler --json benchmarks/results/profiling.json
	$(BIN)/python -m benchmarks.figures --json benchmarks/results/panels.json

tables: install
	$(BIN)/python -m benchmarks.docs_tables

figures: install
	$(BIN)/python -m benchmarks.screenshots

build: install
	rm -rf build
	$(BIN)/python -c "from setuptools import build_meta as m; m.build_sdist('dist'); m.build_wheel('dist')"

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis site ./*_out
