# An image that serves environments:   docker build -t bridge-env .
# with further packages:               docker build -t pong --build-arg PACKAGES="ale-py==0.12.0" .
# `PACKAGES` are requirements of pip, separated by spaces; `.dockerignore` says what of this folder is sent.
ARG PYTHON=3.13.9-slim-trixie

FROM python:${PYTHON} AS build
WORKDIR /source
COPY deploy/constraints.txt ./
COPY pyproject.toml README.md LICENSE ./
COPY bridge bridge
COPY wrappers wrappers
ARG EXTRAS=ops
ARG PACKAGES=""
# The versions of what this package needs are those of constraints.txt; `ops` has the health service that probes ask.
RUN python -m venv /opt/bridge \
    && /opt/bridge/bin/pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" ${PACKAGES}

FROM python:${PYTHON}
COPY --from=build /opt/bridge /opt/bridge
ENV PATH=/opt/bridge/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051
# `bridge` is process 1 itself: SIGTERM reaches it, and it drains.
ENTRYPOINT ["bridge"]
CMD ["serve", "CartPole-v1", "--host", "0.0.0.0", "--port", "50051"]
