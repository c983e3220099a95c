# Verifier and drafter, for NVIDIA GPUs and for CPUs: PyTorch's wheels carry their own CUDA libraries. A C compiler stays
# in the image, for the native CPU step is compiled for the machine it runs on. Built from the repository's root.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY checkpoints checkpoints
COPY foveate foveate
COPY engine engine
COPY drafter_svc drafter_svc
COPY verifier_svc verifier_svc
COPY gateway gateway
RUN python -m venv /opt/foveate && /opt/foveate/bin/pip install --no-cache-dir '.[engine,telemetry]'

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/foveate /opt/foveate
COPY deploy/docker/engine.sh /usr/local/bin/foveate-engine
ENV PATH=/opt/foveate/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN chmod 0755 /usr/local/bin/foveate-engine && useradd --system --uid 10001 --create-home foveate
USER 10001
EXPOSE 50051 50052 9464 9465
ENTRYPOINT ["foveate-engine"]
CMD ["both"]
