# The gateway: no torch, no model, no compiler. Built from the repository's root.
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
RUN python -m venv /opt/foveate && /opt/foveate/bin/pip install --no-cache-dir '.[telemetry]'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/foveate /opt/foveate
ENV PATH=/opt/foveate/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --uid 10001 --no-create-home foveate
USER 10001
EXPOSE 8080 9464
ENTRYPOINT ["python", "-m", "gateway.main"]
CMD ["--address", "0.0.0.0:8080", "--metrics-address", "0.0.0.0:9464"]
