# docker build -t cohort .                              on a CPU
# docker build -t cohort --build-arg DEVICE=cuda .      with CUDA and vLLM
# docker run --rm -v "$PWD/runs:/work/runs" cohort study run quickstart
# docker run --rm -v "$PWD/runs:/work/runs" --gpus all --ipc=host cohort study run gsm8k_qwen
# docker run --rm -v "$PWD/runs:/work/runs" --network host cohort ui
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
ARG DEVICE=cpu
WORKDIR /src
COPY . .
RUN .ci/install /opt/cohort ${DEVICE}

FROM python:${PYTHON}-slim
ARG DEVICE=cpu
# Triton and torch.compile, which vLLM uses, build C and C++ when they first run; workers on a CPU take tcmalloc
RUN apt-get update && apt-get install --yes --no-install-recommends "$([ "${DEVICE}" = cuda ] && echo g++ || echo libtcmalloc-minimal4)" \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/cohort /opt/cohort
RUN useradd --create-home cohort && mkdir -p /work/runs && chown -R cohort /work
USER cohort
WORKDIR /work
ENV PATH=/opt/cohort/bin:$PATH OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["cohort"]
CMD ["--help"]
