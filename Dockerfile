# docker build -t cohort .                              on a CPU
# docker build -t cohort --build-arg DEVICE=cuda .      with CUDA and vLLM
# docker run --rm -v "$PWD/runs:/work/runs" cohort study run quickstart
# docker run --rm -v "$PWD/runs:/work/runs" --network host cohort ui
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
ARG DEVICE=cpu
WORKDIR /src
COPY . .
RUN .ci/install /opt/cohort ${DEVICE}

FROM python:${PYTHON}-slim
COPY --from=build /opt/cohort /opt/cohort
RUN useradd --create-home cohort && mkdir -p /work/runs && chown -R cohort /work
USER cohort
WORKDIR /work
ENV PATH=/opt/cohort/bin:$PATH OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["cohort"]
CMD ["--help"]
