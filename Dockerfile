# Paceline and its C library, from the wheels that `make wheels` puts into dist.
# Not run yet: no Docker was at hand.
#
# pip's build of torch is for NVIDIA GPUs: run with --gpus all. For a smaller image without CUDA, name
# the index of CPU builds that PyTorch documents:
#   docker build --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=... -t paceline .
FROM python:3.13-slim
ARG TORCH=torch
ARG PIP_EXTRA_INDEX_URL
WORKDIR /wheels
COPY constraints.txt dist/paceline-*.whl dist/paceline_kernels-*.whl ./
RUN pip install --no-cache-dir -c constraints.txt "$TORCH" \
    && pip install --no-cache-dir -c constraints.txt paceline_kernels-*.whl "$(echo paceline-*.whl)[gguf]"
RUN useradd --create-home paceline
USER paceline
WORKDIR /home/paceline
ENTRYPOINT ["paceline"]
CMD ["env"]
