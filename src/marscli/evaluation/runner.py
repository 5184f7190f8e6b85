"""One evaluation from start to end: check, load, run every task at every τ, save as each task ends.

The order is for a user who waits: the output folder and the model's name are checked first, then the tasks and their
data, and only then a model is loaded. Tasks run one by one through `lm_eval.evaluate`, so that each is timed by itself
and on disk once it is done; lm-eval's group scores are computed from them in the end.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import evaluator
from lm_eval.api.task import Task
from lm_eval.utils import sanitize_model_name, set_torch_seed

from marscli import checkpoint as checkpoints
from marscli.errors import InputError
from marscli.evaluation import processes, report
from marscli.evaluation.config import EvalConfig, threshold_label
from marscli.evaluation.lm import Answer, Progress, Usage, check_settings
from marscli.evaluation.loading import load_lm
from marscli.evaluation.results import Run, TaskUsage
from marscli.evaluation.resume import earlier_document, model_files
from marscli.evaluation.suites import PAPER_MAX_NEW_TOKENS, PUBLISHED
from marscli.evaluation.tasks import LoadedTasks, load_tasks
from marscli.meta import collect_meta, versions
from marscli.output import prepared_output_dir, write_json, write_jsonl

logger = logging.getLogger(__name__)

FILES = ("results.json", "pareto.png", "samples_*.jsonl")
MANY_CUT_OFF = 0.05  # share of answers at their token limit above which a score says little
LM_EVAL_SEED = 1234  # of numpy, torch and the choice of examples; Python's own is 0


def run_eval(config: EvalConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Score a model on tasks; see `marscli.evaluate`.

    Args:
        config: What to do.
        progress: ``progress(description, total)``: a context that yields a function to call once per answer.

    Returns:
        What ``results.json`` holds; `report.table` shows it.

    Raises:
        InputError: Wrong input, found before the model is loaded.
        MarsError: The run failed; the tasks that had ended are saved.
    """
    output: AbstractContextManager[Path | None] = nullcontext()
    if config.output_dir is not None:
        output = prepared_output_dir(config.output_dir, FILES, force=config.force, resume=config.resume)
    # lm-eval and its metrics print to stdout now and then, which is kept for the result.
    with output as folder, redirect_stdout(sys.stderr), _quiet_lm_eval():
        checkpoints.check_model_source(config.model, gguf=True)
        if config.tokenizer is None:
            checkpoints.check_tokenizer_source(config.model)
        else:
            checkpoints.check_tokenizer_source(config.tokenizer, "--tokenizer")
        processes.check(config, checkpoints.resolve_device(config.device).type)
        checkpoints.resolve_dtype(config.dtype)
        block_size = _block_size(config)
        chat_template = _uses_chat_template(config)
        earlier = None
        if folder is not None and config.resume:
            earlier = earlier_document(folder, config, versions())
        random.seed(config.seed)  # some tasks shuffle while they are built
        loaded = load_tasks(
            config.tasks,
            include_path=config.include_path,
            data_root=config.data_root,
            confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        )
        for name, task in loaded.tasks.items():
            _apply_options(task, config, name in loaded.paper, loaded.paper.get(name))
        with ExitStack() as stack:
            peers = stack.enter_context(processes.started(config.num_processes))
            if peers is not None:
                peers.tell((config, block_size))
            evaluation = _Evaluation(config, loaded, block_size, chat_template, folder, progress, peers)
            if earlier is not None:
                evaluation.restore(earlier)
            return evaluation.run()


def _block_size(config: EvalConfig) -> int:
    """B of the option or else the checkpoint; refuses what the model cannot do, by its settings alone."""
    settings, context_length = checkpoints.load_settings(config.model, trust_remote_code=config.trust_remote_code)
    if config.max_new_tokens is not None and config.max_new_tokens >= context_length:
        raise InputError(
            f"--max-new-tokens {config.max_new_tokens} leaves no room for a prompt in the context of {config.model}, "
            f"{context_length} tokens",
            hint=f"use {max(1, context_length // 2)} or less, or a model with a longer context",
        )
    if settings is not None:
        if config.block_size is not None and config.block_size > settings.block_size and not settings.is_assumed:
            logger.warning(
                "--block-size %d is more than %s was trained with (%d): tokens past that are guesses",
                config.block_size,
                config.model,
                settings.block_size,
            )
        return config.block_size or settings.block_size
    if config.draft_tokens:
        raise InputError(
            f"--draft-tokens {config.draft_tokens}: {config.model} was never MARS-trained, so it makes no drafts",
            hint="train it with `mars train` first, or leave the option out",
        )
    inexact = [threshold_label(threshold) for threshold in config.threshold if threshold is not None]
    if inexact:
        raise InputError(
            f"--threshold {inexact[0]}: {config.model} was never MARS-trained",
            hint="train it with `mars train` first, or use --threshold exact",
        )
    logger.warning("%s was never MARS-trained: it decodes one token per forward", config.model)
    return 1


def _uses_chat_template(config: EvalConfig) -> bool:
    tokenizer = checkpoints.load_tokenizer(config.tokenizer or config.model, trust_remote_code=config.trust_remote_code)
    has_one = tokenizer.chat_template is not None
    if config.chat_template and not has_one:
        raise InputError(
            f"--chat-template: the tokenizer of {config.tokenizer or config.model} has none",
            hint="leave the option out, or take an instruction-tuned model",
        )
    return has_one if config.chat_template is None else config.chat_template


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Hold back lm-eval's warnings about how we call it; what concerns a user we say ourselves.

    Debug logging shows all.
    """
    theirs = logging.getLogger("lm_eval")
    level = theirs.level
    if not logger.isEnabledFor(logging.DEBUG):
        theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(level)


def _apply_options(task: Task, config: EvalConfig, paper: bool, paper_fewshot: int | None) -> None:
    """Change a task's own settings where the options say so, by the rules of lm-eval's `simple_evaluate`.

    Tasks of ``--tasks paper`` take the paper's settings where no option says otherwise.
    """
    own = task.get_config("num_fewshot")
    num_fewshot = paper_fewshot if config.num_fewshot is None else config.num_fewshot
    if num_fewshot is not None and own == 0 and num_fewshot != 0:
        logger.warning(
            "%s is defined without examples; --num-fewshot %d does not change it", task.task_name, num_fewshot
        )
    elif num_fewshot is not None or own is None:
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    wanted = task.get_config("num_fewshot")
    available = len(list(task.fewshot_docs())) if wanted else 0
    if available < wanted:
        raise InputError(
            f"{task.task_name} has {available} worked examples to choose from, not {wanted}",
            hint=f"use --num-fewshot {available} or less",
        )
    if task.OUTPUT_TYPE != "generate_until":
        return
    settings = dict(task.get_config("generation_kwargs") or {})
    most = PAPER_MAX_NEW_TOKENS if paper and config.max_new_tokens is None else config.max_new_tokens
    if most is not None:
        for alias in _LIMIT_KEYS:
            settings.pop(alias, None)
        settings["max_gen_toks"] = most
        task.set_config(key="generation_kwargs", value=settings)
    check_settings(settings, str(task.task_name))


class _Evaluation:
    """A run's state: the model, what is done so far, where it is saved."""

    def __init__(
        self,
        config: EvalConfig,
        loaded: LoadedTasks,
        block_size: int,
        chat_template: bool,
        folder: Path | None,
        progress: Progress | None,
        peers: processes.Peers | None,
    ) -> None:
        self.config = config
        self.tasks = loaded.tasks
        self.groups = loaded.groups
        self.paper = loaded.paper
        self.stand_ins = loaded.stand_ins
        self.folder = folder
        self.runs = [Run(threshold) for threshold in config.threshold]
        self.started = time.time()
        self.checkpoint, self.lm = load_lm(config, block_size, peers=peers, progress=progress)
        self.meta = collect_meta(
            config.resolved(), seed=config.seed, device=self.checkpoint.device, dtype=self.checkpoint.dtype
        )
        self.block_size = block_size
        self.chat_template = chat_template

    def restore(self, document: Mapping[str, Any]) -> None:
        """Take over what an earlier run with the same settings had done; samples that are gone are made again."""
        self.runs = [
            Run.restored(threshold, entry, document)
            for threshold, entry in zip(self.config.threshold, document["mars"]["runs"], strict=True)
        ]
        if self.config.log_samples and self.folder is not None:
            for run in self.runs:
                for name in list(run.usage):
                    copied = run is not self.runs[0] and not run.usage[name].answers
                    if not copied and not self._samples_path(name, run).exists():
                        run.forget(name)

    def run(self) -> dict[str, Any]:
        """Run every task at every τ, save after each, and return the result document."""
        if (
            self.folder is not None and not self.config.resume
        ):  # with --force an earlier run's would pass for this one's
            for path in [path for pattern in FILES for path in self.folder.glob(pattern)]:
                path.unlink()
        try:
            for name, task in self.tasks.items():
                if all(name in run.results for run in self.runs):
                    logger.info("%s: done already", name)
                    continue
                self._announce(name, task)
                for run in self.runs:
                    first = self.runs[0]
                    if name in run.results:
                        continue
                    if run is not first and not first.usage[name].answers:  # likelihoods do not depend on τ
                        run.results[name], run.usage[name] = first.results[name], first.usage[name]
                    else:
                        self._run_task(name, task, run)
                    self._save(complete=False)
        except BaseException:
            done = sum(name in self.runs[-1].results for name in self.tasks)
            if done and self.folder is not None:
                logger.info(
                    "%d of %d tasks had ended; they are in %s, and the same command with --resume goes on",
                    done,
                    len(self.tasks),
                    self.folder / FILES[0],
                )
            raise
        return self._save(complete=True)

    def _announce(self, name: str, task: Task) -> None:
        """Say what is to come, with the one rule for the token limit: the option, else the task's own, else 256."""
        problems = len(task.eval_docs)
        limited = problems if self.config.limit is None else min(problems, self.config.limit)
        text = f"{name}: {limited} of {problems} problems" if limited < problems else f"{name}: {problems} problems"
        if task.OUTPUT_TYPE == "generate_until":
            settings = task.get_config("generation_kwargs") or {}
            own = next((settings[key] for key in _LIMIT_KEYS if settings.get(key) is not None), self.lm.max_gen_toks)
            paper = "the paper's limit" if name in self.paper else "the task's own limit"
            source = paper if self.config.max_new_tokens is None else "--max-new-tokens"
            text += f", at most {own} new tokens each ({source}), {self.config.batch_size} rows together"
            if self.config.num_processes > 1:
                text += f" in each of {self.config.num_processes} processes"
        else:
            text += ", scored by likelihood"
        logger.info("%s", text)

    def _run_task(self, name: str, task: Task, run: Run) -> None:
        self.lm.threshold = run.threshold
        self._seed(task)
        started = time.perf_counter()
        result: Any = evaluator.evaluate(
            lm=self.lm,
            task_dict={"tasks": {name: task}, "groups": {}},
            limit=self.config.limit,
            log_samples=self.config.log_samples,
            system_instruction=self.config.system,
            apply_chat_template=self.chat_template,
            fewshot_as_multiturn=self.chat_template,
            confirm_run_unsafe_code=self.config.confirm_run_unsafe_code,
        )
        usage = self.lm.take_usage()
        if self.config.log_samples:
            self._write_samples(name, run, result.pop("samples")[name], usage)
        run.results[name] = result
        run.usage[name] = TaskUsage.of(usage, time.perf_counter() - started)
        _warn(f"{name} τ={threshold_label(run.threshold)}" if usage.answers else name, run.usage[name])

    def _seed(self, task: Task) -> None:
        """Make a task's questions and examples the same at every τ, whatever ran before; seed 0 is lm-eval's choice."""
        seed = self.config.seed
        random.seed(seed)
        np.random.seed(LM_EVAL_SEED + seed)
        set_torch_seed(LM_EVAL_SEED + seed)
        task.set_fewshot_seed(seed=LM_EVAL_SEED + seed)

    def _write_samples(self, name: str, run: Run, samples: list[dict[str, Any]], usage: Usage) -> None:
        """lm-eval's sample objects, with what each answer cost."""
        if self.folder is None:
            return
        costs: dict[int, list[Answer]] = {}
        for answer in usage.answers:
            costs.setdefault(answer.question.doc_id, []).append(answer)
        rows = []
        for sample in samples:
            mine = costs.get(sample["doc_id"], [])
            cost = {
                "tokens": sum(len(answer.tokens) for answer in mine),
                "forwards": sum(answer.forwards for answer in mine),
                "finish_reason": [answer.finish_reason for answer in mine],
            }
            rows.append({**sample, **(cost if mine else {})})
        write_jsonl(self._samples_path(name, run), rows)

    def _samples_path(self, name: str, run: Run) -> Path:
        assert self.folder is not None
        return self.folder / f"samples_{name.replace('/', '_')}_{threshold_label(run.threshold)}.jsonl"

    def _save(self, *, complete: bool) -> dict[str, Any]:
        document = self._document(complete=complete)
        if self.folder is not None:
            write_json(self.folder / "results.json", document)
            if complete and len(self.runs) > 1 and not report.pareto(document, self.folder / "pareto.png"):
                logger.info("no pareto.png: no task generates text, so none has a speed")
        return document

    def _document(self, *, complete: bool) -> dict[str, Any]:
        """The result document of the tasks that are done; ``complete`` says that these are all."""
        config = self.config
        lm_eval_keys = self.runs[0].combined(self.groups)
        template = self.lm.chat_template(True) if self.chat_template else ""
        return {
            **lm_eval_keys,
            "config": {
                "model": "marscli",
                "model_args": {"pretrained": config.model, "threshold": threshold_label(config.threshold[0])},
                "batch_size": config.batch_size,
                "device": str(self.checkpoint.device),
                "limit": config.limit,
                "random_seed": config.seed,
                "numpy_seed": LM_EVAL_SEED + config.seed,
                "torch_seed": LM_EVAL_SEED + config.seed,
                "fewshot_seed": LM_EVAL_SEED + config.seed,
            },
            "date": self.started,
            "total_evaluation_time_seconds": str(time.time() - self.started),
            "model_source": "marscli",
            "model_name": self.checkpoint.name,
            "model_name_sanitized": sanitize_model_name(self.checkpoint.name),
            "max_length": self.checkpoint.context_length,
            "system_instruction": config.system,
            "fewshot_as_multiturn": self.chat_template,
            "chat_template": template or None,
            "chat_template_sha": hashlib.sha256(template.encode()).hexdigest() if template else None,
            "mars": {
                "complete": complete,
                "limit": config.limit,
                "confidence": config.confidence,
                "block_size": self.block_size,
                "draft_tokens": config.draft_tokens,
                "batch_size": config.batch_size,
                "num_processes": config.num_processes,
                "paper": bool(self.paper),
                "stand_ins": {name: self.stand_ins[name] for name in self.tasks if name in self.stand_ins},
                "model_files": model_files(config.model),
                **({"paper_reference": [row.to_dict() for row in PUBLISHED]} if config.paper_reference else {}),
                "runs": [run.to_dict(self.groups, config.confidence, config.verify) for run in self.runs],
            },
            "meta": self.meta,
        }


# What limits the new tokens of an answer, the first that is given; by the rule of lm-eval.
_LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _warn(what: str, usage: TaskUsage) -> None:
    if usage.answers and usage.hit_limit > MANY_CUT_OFF * usage.answers:
        logger.warning(
            "%s: %d of %d answers were cut off at the token limit, so the score may be too low; "
            "a larger --max-new-tokens gives them room",
            what,
            usage.hit_limit,
            usage.answers,
        )
    if usage.prompts_cut:
        logger.warning(
            "%s: %d prompts were longer than the model's context leaves room for and were cut from the left",
            what,
            usage.prompts_cut,
        )
