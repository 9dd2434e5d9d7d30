# minitri on a CPU, with the default model in the image:
#   docker build -t minitri . && docker run -it --rm minitri chat
FROM python:3.12-slim AS wheels
RUN pip install --no-cache-dir ziglang "setuptools>=70.1"
WORKDIR /clone
COPY . .
RUN python -m tools.build_wheels --out /wheels

FROM python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
RUN --mount=from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*_$(uname -m).whl)[gguf,documents,serve]"
RUN useradd --create-home minitri
USER minitri
WORKDIR /home/minitri
# Fetches the model, and checks that speculation does not change its text.
RUN minitri selftest --max-prompt-tokens 300 --max-new-tokens 8 --num-samples 64 --method naive
ENTRYPOINT ["minitri"]
CMD ["--help"]
