"""Write GSM8K's training problems as JSON lines for `mars train`, the calculator annotations `<<...>>` stripped.

python examples/prepare_gsm8k.py gsm8k_train.jsonl                            # from the Hub
python examples/prepare_gsm8k.py gsm8k_train.jsonl --data-root $DATA_ROOT     # from $DATA_ROOT/openai/gsm8k
"""

import argparse
import json
import re
from pathlib import Path

from datasets import load_dataset


def main() -> None:
    """Read, strip, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data-root", type=Path, help="folder that holds openai/gsm8k")
    parser.add_argument("--split", default="train", choices=["train", "test"])
    args = parser.parse_args()
    source = "openai/gsm8k" if args.data_root is None else str(args.data_root / "openai" / "gsm8k")
    rows = load_dataset(source, "main", split=args.split)
    with args.output.open("w", encoding="utf-8") as file:
        for row in rows:
            answer = re.sub(r"<<[^>]*>>", "", row["answer"])
            file.write(json.dumps({"question": row["question"], "answer": answer}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
