# syntax=docker/dockerfile:1
#
#   docker build -t ppserve .
#   docker run --rm -p 50051:50051 -p 8000:8000 -p 9400:9400 --shm-size 1g ppserve
#   docker run ... -v /models:/models:ro ppserve --model /models/gpt2 --stages 4 --host 0.0.0.0
#
# TORCH=cpu (the default) takes a CPU build of torch and nothing of CUDA. Where pip's own index has none, name
# the one that has: --build-arg PIP_EXTRA_INDEX_URL=... TORCH=cuda takes pip's default build, with its CUDA
# libraries, and a C compiler, which Triton needs at its first launch; run that with --gpus all.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/ppserve
# Torch has a layer of its own: it is large, and changes less often than what is served with it.
COPY constraints.txt ./
RUN version=$(sed -n 's/^torch==//p' constraints.txt) \
 && if [ "$TORCH" = cpu ]; then version="$version+cpu"; fi \
 && /opt/ppserve/bin/pip install -c constraints.txt "torch==$version" \
 || { echo "no such build of torch: see PIP_EXTRA_INDEX_URL in the Dockerfile" >&2; exit 1; }
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
