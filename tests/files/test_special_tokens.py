"""Special tokens: what other engines read in the same files, over all files and keys."""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import sentencepiece
from tokenizers import pre_tokenizers, processors

from minitri.files.checkpoint import load_tokenizer, placements
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_folder import Folder
from minitri.files.vocabulary import read_model
from minitri.text.tokenizer import StreamDetokenizer, Tokenizer
from tests.conftest import SENTENCES, byte_level_tokenizer, load, refused, tiny_model
from tests.core.rigs import tiny_config
from tests.files.gguf_writer import pieces, write_gguf
from tests.files.test_checkpoint import copy_of

CONFIG = tiny_config(vocab_size=900, bos_token_id=1, eos_token_ids=(2,))
PROMPTS = [
    *("The sea", "<s>[INST] Hi [/INST] Yes</s>", "日本語🙂</s>x", "a <tool> b<tool>c", "<s>"),
    *("<|im_start|>user\nHi<|im_end|>\n<s> x", "</s> the", "x<pad>y <unk> z", " Hi", "  "),
    *("0 <0x41> ▁ x", "<|im_end|><|im_end|>", "WE'LL go: 1234 gulls", "\n\n", "a\t b", *SENTENCES),
]
DOUBLED = {text for text in PROMPTS if text.startswith(" ") or "> " in text}
"""Prompts in which a space begins a text, or what follows a control token."""
ENDS = [("<s>", 1), ("</s>", 2)]
PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(),
    "bos": processors.TemplateProcessing(single="<s> $A", special_tokens=ENDS),
    "eos": processors.TemplateProcessing(single="$A </s>", special_tokens=ENDS),
    "both": processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ENDS),
    "two": processors.TemplateProcessing(single="</s> <s> $A", special_tokens=ENDS),
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
}
PROCESSORS["sequence"] = processors.Sequence([processors.ByteLevel(), PROCESSORS["bos"]])


def flags(text: str, **changes: object) -> dict[str, object]:
    kept = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": text, **kept, "special": True, **changes}


def files(n: int) -> dict[str, dict[str, dict]]:
    """Files of a folder by cases; `n` is the first id after the vocabulary."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    dicts = {name: flags(text, __type="AddedToken") for name, text in names.items()}
    marks = {str(n): flags("<|im_start|>"), str(n + 1): flags("<|im_end|>")}
    tool = flags("<tool>", special=False, lstrip=True, rstrip=True)
    chat = ["<|im_start|>", "<|im_end|>"]
    new = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "image_token": "<tool>"}
    added = {"<|im_start|>": n, "<|im_end|>": n + 1, "<tool>": n + 2}
    wrong = {"bos_token": "</s>", "add_bos_token": True}
    config = {
        "empty": {},
        "names": names,
        "dicts": dicts,
        "adds bos": {**names, "add_bos_token": True},
        "adds both": {**names, "add_bos_token": True, "add_eos_token": True},
        "adds none": {**names, "add_bos_token": False},
        "decoder": {**new, "added_tokens_decoder": {**marks, str(n + 2): tool}},
        "flags": {"added_tokens_decoder": {"1": flags("<s>"), "2": flags("</s>", rstrip=True)}},
        "spelled": {**names, "split_special_tokens": True},
        "plain": {"added_tokens_decoder": {"1": flags("<s>", special=False)}},
        "more names": {"extra_special_tokens": {"a_token": "<tool>", "b_token": "<s>"}},
        "additional": {"additional_special_tokens": chat},
        "extra": {"extra_special_tokens": chat},
        "new names": new,
    }
    cases = {case: {"tokenizer_config": content} for case, content in config.items()}
    cases["map"] = {"special_tokens_map": names}
    cases["added"] = {"special_tokens_map": {"eos_token": "<|im_end|>"}, "added_tokens": added}
    cases["map adds bos"] = {"tokenizer_config": wrong, "special_tokens_map": names}
    hidden = {**wrong, "added_tokens_decoder": {"1": flags("<s>")}}
    cases["hidden map adds bos"] = cases["map adds bos"] | {"tokenizer_config": hidden}
    return {"nothing": {}, **cases}


def write(folder: Path, case: dict[str, dict]) -> None:
    for name, content in case.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pieces")
    nfkc = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}
    return {
        "bpe": pieces(folder / "bpe", model_type="bpe"),
        "whole": pieces(folder / "whole", model_type="bpe", user_defined_symbols=["(c)", "ea"]),
        "unigram": pieces(folder / "unigram", model_type="unigram"),
        "nfkc": pieces(folder / "nfkc", model_type="unigram", **nfkc),
    }


def expected(theirs, text: str, default: list[int]) -> list[int]:
    """Ids of `transformers`, without what is put after a text, and in front of it not doubled."""
    ids, sample = (theirs.encode(it, add_special_tokens=False) for it in (text, "x"))
    whole = theirs.encode("x")
    start = next(n for n in range(len(whole)) if whole[n : n + len(sample)] == sample)
    prefix = whole[:start] or default
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def differences(theirs, folder: Path, default: list[int]) -> list[str]:
    ours = load_tokenizer(Folder(folder), CONFIG)
    found = [text for text in PROMPTS if ours.encode(text) != expected(theirs, text, default)]
    shown = functools.partial(theirs.decode, skip_special_tokens=True)
    return found + [it for it in PROMPTS if ours.decode(ids := ours.encode(it)) != shown(ids)]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("bpe", "unigram")]


@pytest.mark.parametrize("kind", ["bytes", *SLOW])
def test_tokenizer_json_reads_as_in_transformers(kind, models, tmp_path):
    """One exception: `add_bos_token` counts where tokenizer.json puts nothing in front;
    `transformers` 5 ignores it there, before it the classes of Llama did not."""
    from transformers import PreTrainedTokenizerFast

    pipeline = byte_level_tokenizer()
    if kind != "bytes":
        (tmp_path / "tokenizer.model").write_bytes(models[kind].read_bytes())
        pipeline = PreTrainedTokenizerFast.from_pretrained(tmp_path).backend_tokenizer
    content = json.loads(pipeline.to_str())
    for name, processor in PROCESSORS.items():
        pipeline.post_processor = processor or processors.ByteLevel()
        given = json.loads(pipeline.to_str())["post_processor"] if processor else None
        for case, more in files(pipeline.get_vocab_size()).items():
            folder = tmp_path / name / case
            folder.mkdir(parents=True)
            (folder / "tokenizer.json").write_text(json.dumps(content | {"post_processor": given}))
            write(folder, more)
            theirs = PreTrainedTokenizerFast.from_pretrained(folder)
            adds = []
            if name in ("none", "bytes") and "adds b" in case:
                adds = [2] if "hidden" in case else [1]
            assert differences(theirs, folder, adds) == [], (name, case)


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [None, True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram", "nfkc", "LlamaTokenizer"])
def test_tokenizer_model_reads_as_in_transformers(kind, legacy, models, tmp_path):
    """Exceptions: BOS comes first where no file says whether, as in llama.cpp and `transformers` 4;
    with `legacy` two spaces are two in LlamaTokenizer, too, as they are for sentencepiece."""
    import transformers

    is_llama = kind == "LlamaTokenizer"
    model = models["bpe" if is_llama else kind].read_bytes()
    loader = transformers.LlamaTokenizer if is_llama else transformers.PreTrainedTokenizerFast
    more = {} if legacy is None else {"legacy": legacy}
    more |= {"tokenizer_class": kind} if is_llama else {}
    size = sentencepiece.SentencePieceProcessor(model_proto=model).vocab_size()
    for case, given in files(size).items():
        folder = tmp_path / case
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(model)
        config = given.get("tokenizer_config", {}) | more
        write(folder, given | {"tokenizer_config": config})
        default = [] if "add_bos_token" in config else [1]
        found = differences(loader.from_pretrained(folder), folder, default)
        assert found == [] or (is_llama and legacy and {*found} <= DOUBLED), case


WORDS = ("gpt-2", "llama-bpe", "qwen2", "smollm", "default", "tekken", "gpt-4o")
KEYS = json.loads(Path(__file__).with_name("gguf_keys.json").read_text("utf-8"))
"""Changes of keys of a GGUF file's tokenizer."""


def llama_cpp_server(path: Path, num_tokens: int = 256) -> Callable[..., dict]:
    """A function that sends requests about a GGUF file to llama.cpp, and returns the answers."""
    llama_cpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed")
    params = llama_cpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.verbosity = num_tokens, 1, -1
    params.cpuparams.n_threads = 1
    params.warmup = params.fit_params = False
    server = llama_cpp.Server(params)

    def ask(what: str, **body: object) -> dict:
        data = json.dumps({"parse_special": True, **body}).encode()
        kind = {"content-type": "application/json"}
        return json.load(urlopen(Request(f"{server.listening_address}/{what}", data, kind)))

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["", *WORDS])
def test_gguf_reads_as_in_llama_cpp(pre, tmp_path):
    """Ids of prompts and texts, and the tokens that end an answer; "" is sentencepiece. Without ids
    llama.cpp ends byte-level texts at token 11, a letter: that is left out."""
    words = byte_level_tokenizer()
    words.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<pad>"])
    words.add_special_tokens(["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"])
    words.add_tokens(["<tool>"])
    size = words.get_vocab_size()
    if not pre:
        marks = {"control_symbols": ["<|im_start|>", "<|im_end|>"]}
        marks["user_defined_symbols"] = ["<tool>"]
        words = pieces(tmp_path / "bpe", model_type="bpe", **marks)
        size = sentencepiece.SentencePieceProcessor(str(words)).vocab_size()
    config = tiny_config(vocab_size=size, hidden_size=64, head_dim=16)
    for case, changes in KEYS.items():
        if pre and case in ("without ids", "no ids"):
            continue
        weights = placements(tiny_model(config))
        path = write_gguf(tmp_path / f"{case}.gguf", config, words, weights, "F32", changes, pre)
        ours = load_tokenizer(GgufFile(path), GgufFile(path).config("x"))
        ask = llama_cpp_server(path)
        for text in PROMPTS:
            ids = ask("tokenize", content=text, add_special=True)["tokens"]
            ids = ids[1:] if ids[:2] == [1, 1] else ids
            assert ours.encode(text) == ids, (case, text)
            assert ours.encode_marked(text) == ask("tokenize", content=text)["tokens"], (case, text)
        how = {"prompt": [size - 40, size - 41], "n_predict": 2, "temperature": 0}
        tried = [*range(12), *ours.controls.values()]
        stops = (ask("completion", **how, logit_bias=[[token, 1000]]) for token in tried)
        ends = {
            token for token, stop in zip(tried, stops, strict=True) if stop["stop_type"] == "eos"
        }
        assert {*ours.special.ends} == ends, case


@pytest.mark.parametrize("kind", ["GPT2TokenizerFast", "Qwen2Tokenizer", "TokenizersBackend"])
def test_add_prefix_space_counts_in_two_classes_as_in_transformers(kind, tmp_path):
    for inner in (False, True):
        words = byte_level_tokenizer()
        words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(inner)])
        words.save(str(tmp_path / "tokenizer.json"))
        for space in (None, False, True):
            write(
                tmp_path, {"tokenizer_config": {"tokenizer_class": kind, "add_prefix_space": space}}
            )
            tokenizer = load_tokenizer(Folder(tmp_path), CONFIG)
            begins = inner if kind == "TokenizersBackend" else space is True
            assert tokenizer.token(tokenizer.encode("The")[0])[0] == ("Ġ" if begins else "T")


def chat_folder(folder: Path, **config: object) -> Path:
    pipeline = byte_level_tokenizer()
    pipeline.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|eot_id|>"])
    pipeline.save(str(folder / "tokenizer.json"))
    write(folder, {"tokenizer_config": config})
    return folder


def test_an_answer_ends_where_any_file_or_the_usual_marks_end_a_turn(folder, tmp_path):
    names = {"eos_token": flags("<|im_start|>"), "bos_token": "<s>", "eot_token": "<unk>"}
    copy = chat_folder(copy_of(folder, tmp_path / "model", "tokenizer.json"), **names)
    size = byte_level_tokenizer().get_vocab_size()
    write(copy, {"generation_config": {"eos_token_id": [2, 5]}})
    engine = load(copy)
    assert engine.config.eos_token_ids == (2, 5, size, 0, size + 2, size + 1)
    for mark in (size + 1, size + 2):
        done = engine.complete("The sea", max_new_tokens=4, logit_bias={mark: 100})
        assert (done.finish_reason, done.text, len(done.token_ids)) == ("eos", "", 1)
    write(copy, {"generation_config": {"eos_token_id": None}})
    assert Folder(copy).config("x").eos_token_ids == (2,)


def test_a_control_token_as_a_stop_string_stops_there_and_is_not_shown(tmp_path):
    tokenizer = load_tokenizer(Folder(chat_folder(tmp_path)), CONFIG)
    stop = tokenizer.control_ids(["<|im_end|>"])["<|im_end|>"]
    ids = tokenizer.encode("The sea")
    for shown in ((), (stop,)):
        reader = StreamDetokenizer(tokenizer, [1], stop=("<|im_end|>", "sea!"), shown=shown)
        texts = [reader(token) for token in [*ids, stop]]
        assert "".join(text for text, _ in texts) == "The sea"
        assert [is_stop for _, is_stop in texts] == [False] * len(ids) + [True]


def test_files_that_contradict_each_other_are_refused_in_one_line(tmp_path):
    for number in (0, 500):
        chat_folder(tmp_path, added_tokens_decoder={str(number): flags("<|im_end|>")})
        with refused(f"'<|im_end|>' is token {number} in one file and"):
            load_tokenizer(Folder(tmp_path), CONFIG)


def test_a_way_to_cut_words_that_is_unknown_or_not_told_is_named(tmp_path, caplog):
    words = byte_level_tokenizer()
    path = write_gguf(tmp_path / "known.gguf", CONFIG, words, pre="deepseek-r1-qwen")
    assert Tokenizer(GgufFile(path).tokenizer()).encode("WE'LL")
    path = write_gguf(tmp_path / "unknown.gguf", CONFIG, words, pre="words-of-2030")
    with refused("'words-of-2030'", "tokenizer.ggml.pre", "llama-bpe"):
        GgufFile(path).tokenizer()
    path = write_gguf(tmp_path / "silent.gguf", CONFIG, words, changes={"tokenizer.ggml.pre": None})
    with caplog.at_level(logging.WARNING):
        GgufFile(path).tokenizer()
    assert "tokenizer.ggml.pre" in caplog.text


def test_pieces_cut_texts_as_sentencepiece_does(models):
    for kind in ("bpe", "whole", "unigram", "nfkc"):
        theirs = sentencepiece.SentencePieceProcessor(str(models[kind]))
        ours = Tokenizer(read_model(models[kind].read_bytes(), "always"))
        for text in (*SENTENCES, " ".join(SENTENCES)[::-1], "  ", "", "ﬁ ½ \u3000x  y ", "(c)ea"):
            assert ours.encode(text) == theirs.encode(text), (kind, text)
