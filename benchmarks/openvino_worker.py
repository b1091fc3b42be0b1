"""Serves OpenVINO GenAI over JSON lines on stdin and stdout.

Arguments: TARGET GAMMA [DRAFT]. Needs a Python environment with OpenVINO GenAI.
"""

import json
import sys
import time

import numpy
import openvino
import openvino_genai


def main() -> None:
    target, gamma, *draft = sys.argv[1:]
    more = {"draft_model": openvino_genai.draft_model(draft[0], "CPU")} if draft else {}
    pipeline = openvino_genai.LLMPipeline(target, "CPU", **more)
    print(json.dumps({"version": openvino_genai.get_version()}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = request["count"]
        settings.ignore_eos = True
        settings.do_sample = False
        if draft:
            settings.num_assistant_tokens = int(gamma)
        tokens = openvino.Tensor(numpy.array([request["prompt"]], dtype=numpy.int64))
        start = time.perf_counter()
        answer = pipeline.generate(tokens, settings)
        seconds = time.perf_counter() - start
        count = len(answer.tokens[0])
        print(json.dumps({"seconds": seconds, "count": count}), flush=True)


if __name__ == "__main__":
    main()
