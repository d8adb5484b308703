# syntax=docker/dockerfile:1
#
#   docker build -t ppserve .
#   docker run --rm -p 50051:50051 -p 8000:8000 -p 9400:9400 --shm-size 1g ppserve
#   docker run ... -v /models:/models:ro ppserve --model /models/gpt2 --stages 4 --host 0.0.0.0
#
# TORCH=cpu (the default) takes torch's CPU build where it can be had, from pip's indexes (another one is added by
# --build-arg PIP_EXTRA_INDEX_URL=...) or from torch's own, and else the package index's build, which brings CUDA's
# libraries and runs on CPUs as well; the log of the build says which, and its size. TORCH=cuda takes the latter at
# once, and a C compiler, which Triton needs at its first launch; run that with --gpus all.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/ppserve
# Torch has a layer of its own: it is large, and changes less often than what is served with it.
COPY constraints.txt ./
COPY tools/install_torch.py tools/
RUN /opt/ppserve/bin/python tools/install_torch.py "$TORCH"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY ppserve ppserve
RUN /opt/ppserve/bin/pip install -c constraints.txt ".[hub]"

FROM python:${PYTHON}-slim
ARG TORCH=cpu
RUN apt-get update \
 && if [ "$TORCH" = cpu ]; then compiler=; else compiler="gcc libc6-dev"; fi \
 && apt-get install -y --no-install-recommends tini $compiler \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home --home-dir /var/lib/ppserve ppserve
COPY --from=build /opt/ppserve /opt/ppserve
# Kernels that are compiled at the first start, and --layers auto's measurements, are kept in the home
# directory; where the root is read-only, below /tmp.
ENV PATH=/opt/ppserve/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/ppserve
EXPOSE 50051 8000 9400
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=90s CMD ["ppserve", "health"]
# The command re-executes itself under torchrun, one rank per stage; tini hands signals on and reaps.
ENTRYPOINT ["tini", "--", "ppserve", "serve"]
CMD ["--stages", "2", "--host", "0.0.0.0"]
