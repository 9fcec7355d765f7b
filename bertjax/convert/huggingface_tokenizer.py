"""Tokenizer of a Hugging Face folder, built from its files as `AutoTokenizer` of transformers does."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, BertWordPieceTokenizer, Tokenizer, processors

from bertjax.convert.families import FAMILIES
from bertjax.convert.portable import read_vocabulary_file
from bertjax.convert.tokenizer_classes import (
    BERT,
    BPE_MERGES,
    BPE_VOCABULARY,
    BYTE_LEVEL,
    CONFIG,
    DEFAULTS,
    MAX_WORD_CHARS,
    MODEL_TYPES,
    PYTHON_CLASSES,
    TOKENIZER,
    UNIGRAM,
    VOCABULARY,
    as_token,
    build_tokenizer,
    fits,
    unused_parts,
)
from bertjax.data.corpus.vocabulary import (
    CONTINUATION,
    SPECIAL_PIECES,
    TOKENIZER_JSON,
    VOCABULARY_FILES,
    WORDPIECE,
    Vocabulary,
    load_tokenizer_json,
    load_vocabulary,
    named_special_ids,
)
from bertjax.errors import UsageError, first_line
from bertjax.model.config import ModelConfig
from bertjax.utils.json_files import read_object, write_json

_SPECIAL_TOKENS, _ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
TOKENIZER_FILES = (VOCABULARY, BPE_VOCABULARY, BPE_MERGES, CONFIG, TOKENIZER, _SPECIAL_TOKENS, _ADDED_TOKENS, "*.model")
# Model types whose `tokenizer_class` transformers ignores (`MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS`), because it
# is wrong in some models, such as mmBERT.
_GENERIC, _GENERIC_MODELS = "PreTrainedTokenizer", ("modernbert",)
# Names of the special tokens in `tokenizer_config.json`, in the order in which transformers adds them.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_TYPE_IDS = "token_type_ids"
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
# Substitutes for special tokens that a tokenizer lacks.
_STANDINS = {"cls_token": "bos_token", "sep_token": "eos_token", "unk_token": "pad_token"}


def read_tokenizer(folder: Path, lower_case: bool | None = None) -> tuple[Vocabulary | None, bool, list[str]]:
    """Reads a folder's tokenizer. Raises a UsageError if it is unsupported.

    The token ids equal those of `AutoTokenizer`, unless a note says otherwise. `lower_case`, if not None, replaces
    `do_lower_case` of the folder.

    Returns:
      The vocabulary (None if the folder contains no vocabulary), `Architecture.pair_segments`, and notes for the user.
    """
    config, tokenizer = (read_object(folder / name, optional=True) for name in (CONFIG, TOKENIZER))
    model = read_object(folder / "config.json", optional=True)
    family = FAMILIES.get(model.get("model_type") or "bert")
    class_name = config.get("tokenizer_class")
    if class_name is None:
        class_name = model.get("tokenizer_class") or (family.tokenizer_class if family else _GENERIC)
    is_generic = model.get("model_type") in _GENERIC_MODELS
    tokenizer_class = _GENERIC if is_generic else str(class_name).removesuffix("Fast")
    if is_unknown := bool(tokenizer) and tokenizer_class not in PYTHON_CLASSES and not fits(tokenizer_class, tokenizer):
        tokenizer_class = _GENERIC
    model_type = MODEL_TYPES.get(tokenizer_class, "")
    is_bert = model_type == BERT
    has_vocabulary = bool(tokenizer) or (model_type == BYTE_LEVEL and (folder / BPE_MERGES).is_file())
    has_class = (folder / CONFIG).is_file() or any(folder.glob("*.model"))
    if not has_vocabulary and not (folder / VOCABULARY).is_file() and (is_bert or not has_class):
        return read_vocabulary_file(folder, lower_case), True, []
    _check_supported(folder, config, tokenizer_class, tokenizer, has_vocabulary)
    try:
        if not config.get(_EXTRA) and _OLD_EXTRA in config:
            config[_EXTRA] = config.pop(_OLD_EXTRA)
        if "added_tokens_decoder" not in config:
            # As in transformers 5, `additional_special_tokens` of this file do not become `extra_special_tokens`.
            for name, token in read_object(folder / _SPECIAL_TOKENS, optional=True).items():
                config[name] = as_token(token, special=True) if isinstance(token, dict) else token
        config = {**DEFAULTS[model_type], **config}
        engine, notes = build_tokenizer(tokenizer_class, folder, config, tokenizer, lower_case)
        if is_unknown:
            notes.append(f"used {TOKENIZER} as it is, without the code of tokenizer_class {class_name!r}")
        tokens = _add_tokens(engine, folder, config, tokenizer)
        if model_type == UNIGRAM:
            tokens |= {"cls_token": tokens["bos_token"], "sep_token": tokens["eos_token"]}
        special_ids = _find_special_ids(engine, folder, tokens)
        cls, sep = ((str(engine.id_to_token(special_ids[name])), special_ids[name]) for name in ("cls", "sep"))
        if is_bert:
            engine.post_processor = processors.BertProcessing(sep, cls)
        elif model_type in (BYTE_LEVEL, UNIGRAM):
            engine.post_processor = processors.RobertaProcessing(sep, cls)
        if model_type and tokenizer and (names := _ignored_parts(engine, tokenizer, special_ids, model_type)):
            parts = ", ".join(names)
            notes.append(f"ignored {parts} of {TOKENIZER}, as transformers does for tokenizer_class {tokenizer_class}")
        # In transformers, DistilBertTokenizer and classes other than BERT's return segments only if the config says so.
        default = (_TYPE_IDS,) if is_bert and tokenizer_class != "DistilBertTokenizer" else ()
        returns_segments = _TYPE_IDS in (config.get("model_input_names") or default)
        has_segments = {"type_vocab_size": 2, **model, **(family.values if family else {})}["type_vocab_size"] > 1
        single = engine.encode("a")
        *separators, pair_segments, note = _read_template(engine, special_ids, has_segments, returns_segments)
        if separators[1] < 0 or (has_segments and returns_segments and any(single.type_ids)):
            raise UsageError(
                f"{folder / TOKENIZER} encodes the text 'a' as {' '.join(single.tokens)} in the segments "
                f"{single.type_ids}, not as [CLS] a [SEP] in segment 0; use a tokenizer with BERT's post_processor"
            )
        notes += filter(None, [note])
    except UsageError:
        raise
    except Exception as error:  # The package `tokenizers` raises `Exception` for all errors.
        raise UsageError(
            f"cannot build the tokenizer of {folder}: {first_line(error)}; correct its tokenizer files"
        ) from error
    vocabulary = _standard_vocabulary(engine, folder, special_ids) if separators == [1, 1] else None
    if vocabulary is None:
        content = engine.to_str().encode()
        vocabulary = load_vocabulary(folder / TOKENIZER, None, content, special_ids=special_ids)
        vocabulary = dataclasses.replace(vocabulary, pair_separators=separators[0], end_separators=separators[1])
    if lower_case not in (None, vocabulary.lower_case):
        option = "--uncased" if lower_case else "--cased"
        raise UsageError(f"{option} has no effect on {folder / TOKENIZER}, which sets lower-casing; omit {option}")
    return vocabulary, pair_segments, notes


def _check_supported(
    folder: Path, config: dict[str, Any], tokenizer_class: str, tokenizer: dict[str, Any], has_vocabulary: bool
) -> None:
    side = str(config.get("truncation_side") or (tokenizer.get("truncation") or {}).get("direction") or "right")
    auto_map = config.get("auto_map") or {}
    class_type = MODEL_TYPES.get(tokenizer_class, "")
    class_name = f"has tokenizer_class {tokenizer_class!r}"
    problems = {
        f"truncates texts at the {side}": side.lower() != "right",
        "needs custom code (auto_map)": isinstance(auto_map, list) or "AutoTokenizer" in auto_map,
        f"{class_name}, which bertjax does not support": tokenizer_class not in MODEL_TYPES,
        f"{class_name}, but lacks {TOKENIZER}, which AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of "
        "transformers writes": class_type != BERT and not has_vocabulary,
        "has split_special_tokens=true, which bertjax does not support": config.get("split_special_tokens"),
    }
    if problem := next((problem for problem, is_found in problems.items() if is_found), ""):
        raise UsageError(f"the tokenizer of {folder} {problem}; use a model with BertTokenizer or a {TOKENIZER}")


def _ignored_parts(
    engine: Tokenizer, tokenizer: dict[str, Any], special_ids: dict[str, int], model_type: str
) -> list[str]:
    """Returns the names of the parts of `tokenizer.json` that differ in `engine`, the tokenizer built from it."""
    if model_type != BERT:
        return unused_parts(model_type, tokenizer)
    built = json.loads(engine.to_str())
    pairs = [(name, built, tokenizer) for name in ("normalizer", "pre_tokenizer")]
    for name in ("unk_token", "continuing_subword_prefix", "max_input_chars_per_word"):
        pairs.append((name, built["model"], tokenizer["model"]))
    names = [name for name, own, file in pairs if file.get(name, own[name]) != own[name]]
    # The form of a row does not depend on the text's token ids, so a vocabulary of one token is enough.
    model = {**built["model"], "vocab": {built["model"]["unk_token"]: 0}}
    probe = {**built, "model": model, "added_tokens": [], "post_processor": tokenizer.get("post_processor")}
    rows = Tokenizer.from_str(json.dumps(probe))
    return names + ["post_processor"] * (_row_form(rows, special_ids) != (1, 1, 1))


def _add_tokens(engine: Tokenizer, folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> dict[str, str]:
    """Adds the tokens that the folder's files define, as transformers does. Returns special tokens, keyed by name."""
    if "added_tokens_decoder" in config:
        added = {int(index): as_token(token) for index, token in config["added_tokens_decoder"].items()}
    else:
        named = [config.get(name) for name in _SPECIAL_NAMES]
        special = {str(token) for token in [*named, *_values(config.get(_EXTRA))] if token}
        added = {
            index: AddedToken(token, normalized=token not in special, special=token in special)
            for token, index in read_object(folder / _ADDED_TOKENS, optional=True).items()
        }
        added |= {token["id"]: as_token(token) for token in tokenizer.get("added_tokens") or []}
    known = engine.get_added_tokens_decoder().values()
    new = [added[index] for index in sorted(added) if repr(added[index]) not in map(repr, known)]
    named = {
        name: as_token(config[name])
        for name in dict.fromkeys((*_SPECIAL_NAMES, *config))
        if name.endswith("_token") and isinstance(config.get(name), str | dict | AddedToken)
    }
    extra = _values(config.get(_EXTRA, config.get(_OLD_EXTRA)))
    if isinstance(config.get(_EXTRA), dict):
        extra += _values(config.get(_OLD_EXTRA))
    for token in [*named.values(), *map(as_token, extra)]:
        if token.content not in {other.content for other in [*known, *new]}:
            new.append(token)
    special = {token.content for token in named.values()}
    contents = {token.content for token in added.values()}
    for name in DEFAULTS[BERT].keys() & named.keys():
        if engine.token_to_id(named[name].content) is None and named[name].content not in contents:
            raise UsageError(
                f"the vocabulary of {folder} lacks {named[name].content}, the {name} of its tokenizer; add it"
            )
    for token in new:
        token.special = token.special or token.content in special
    engine.add_tokens(new)
    for index, token in added.items():
        if engine.token_to_id(token.content) != index:
            raise UsageError(
                f"{folder}: the added token {token.content!r} has id {index}, but it is token "
                f"{engine.token_to_id(token.content)} of the vocabulary; correct the files of the tokenizer"
            )
    return {name: token.content for name, token in named.items()}


def _values(tokens: Any) -> list[Any]:
    return list(tokens.values() if isinstance(tokens, dict) else tokens or ())


def _find_special_ids(engine: Tokenizer, folder: Path, tokens: dict[str, str]) -> dict[str, int]:
    """Returns the ids of the special tokens, keyed by `pad`, `unk`, `cls`, `sep` and `mask`."""
    ids = {token.content: index for index, token in engine.get_added_tokens_decoder().items()}
    special = {name: tokens.get(name, default) for name, default in DEFAULTS[BERT].items()}
    for name, standin in _STANDINS.items():
        if special[name] not in ids and tokens.get(standin) in ids:
            special[name] = tokens[standin]
    if missing := [name for name, token in special.items() if token not in ids]:
        raise UsageError(f"the tokenizer of {folder} has no {', '.join(missing)}; set it in {CONFIG}")
    return {name.removesuffix("_token"): ids[token] for name, token in special.items()}


def _read_template(
    engine: Tokenizer, special_ids: dict[str, int], has_segments: bool, returns_segments: bool
) -> tuple[int, int, bool, str]:
    """Returns the counts of `_row_form`, `Architecture.pair_segments`, and a note for the user ("": none).

    The first count is 0 if pairs are not supported. `has_segments` says whether the model has several segments, and
    `returns_segments` whether the tokenizer returns them.
    """
    (middle, end, segment), pair = _row_form(engine, special_ids), engine.encode("a", "b")
    unsupported = "pairs of texts are not supported: their "
    if not middle:
        return 0, end, True, f"{unsupported}rows are {' '.join(pair.tokens)}, not [CLS] a [SEP] b [SEP]"
    if not has_segments:
        return middle, end, True, ""
    if not returns_segments:
        note = f"both texts of a pair have segment 0, as in transformers: {CONFIG} lacks {_TYPE_IDS}"
        return middle, end, False, note if segment else ""
    if segment is None:
        return 0, end, True, f"{unsupported}segments are {pair.type_ids}"
    return middle, end, segment == 1, ""


def _row_form(engine: Tokenizer, special_ids: dict[str, int]) -> tuple[int, int, int | None]:
    """Returns the number of [SEP] between the texts of a pair and at the end of a row, and the second text's segment.

    The first number is 0 (pairs are unsupported) unless a pair is encoded as [CLS] A [SEP]... B [SEP]. The second
    number is -1 unless a single text is encoded as [CLS] A [SEP] or [CLS] A. The segment is None if it is not 0 or 1,
    or if any token before the second text is not in segment 0.
    """
    cls, sep = special_ids["cls"], special_ids["sep"]
    texts = [engine.encode(text, add_special_tokens=False).ids for text in "ab"]
    single, pair = engine.encode("a").ids, engine.encode("a", "b")
    num_end = next((count for count in (0, 1) if single == [cls, *texts[0], *[sep] * count]), -1)
    num_middle = len(pair) - len(single) - len(texts[1])
    expected = [cls, *texts[0], *[sep] * num_middle, *texts[1], *[sep] * num_end]
    num_second = len(texts[1]) + num_end
    segments = [[0] * (len(pair) - num_second) + [segment] * num_second for segment in (0, 1)]
    segment = segments.index(pair.type_ids) if pair.type_ids in segments else None
    return (num_middle if pair.ids == expected else 0), num_end, segment


def _standard_vocabulary(engine: Tokenizer, folder: Path, special_ids: dict[str, int]) -> Vocabulary | None:
    """Returns the WordPiece vocabulary of the equivalent standard BERT tokenizer, or None if none is equivalent."""
    parts = json.loads(engine.to_str())
    normalizer, model = parts["normalizer"] or {}, parts["model"]
    lower_case = normalizer.get("lowercase")
    standard = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lower_case}
    is_standard = (
        normalizer.pop("strip_accents", None) in (None, lower_case)
        and normalizer == standard
        and parts["pre_tokenizer"] == {"type": "BertPreTokenizer"}
        and (model["type"], model.get("continuing_subword_prefix")) == ("WordPiece", CONTINUATION)
        and model["unk_token"] == SPECIAL_PIECES[1]
        and {*SPECIAL_PIECES} == {token["content"] for token in parts["added_tokens"]}
        and all(engine.token_to_id(f"[{name.upper()}]") == index for name, index in special_ids.items())
        and not any(token[name] for token in parts["added_tokens"] for name in _TOKEN_FLAGS)
    )
    if not is_standard:
        return None
    vocab, file = engine.get_vocab(), folder / VOCABULARY
    lines = "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)).encode()
    # Prefer the content of `vocab.txt`, because its checksum identifies the vocabulary.
    for content in ([file.read_bytes()] if file.is_file() else []) + [lines]:
        vocabulary = load_vocabulary(file, lower_case, content, model["max_input_chars_per_word"])
        if {token: index for index, token in enumerate(vocabulary.pieces)} == vocab:
            return vocabulary
    return None


def write_tokenizer(vocabulary: Vocabulary | None, config: ModelConfig, folder: Path) -> list[str]:
    """Writes the files that `AutoTokenizer` reads, and returns notes for the user."""
    if vocabulary is None:
        return ["the source has no vocabulary; AutoTokenizer will not find one"]
    file_name = VOCABULARY_FILES[vocabulary.kind]
    content = vocabulary.content
    if vocabulary.prefix:
        content = load_tokenizer_json(vocabulary.path, content, vocabulary.prefix).to_str().encode()
    (folder / file_name).write_bytes(content)
    if vocabulary.kind not in (WORDPIECE, TOKENIZER_JSON):
        return [f"{file_name} is a SentencePiece model, which Hugging Face's BERT tokenizers cannot read"]
    ids, family = named_special_ids(vocabulary), FAMILIES.get(config.model_type)
    fields = {f"{name}_token_id": name for name in ids} | dict(family.token_ids if family else {})
    special_tokens = {field.removesuffix("_id"): vocabulary.pieces[ids[name]] for field, name in fields.items()}
    is_bert = vocabulary.kind == WORDPIECE and vocabulary.max_word_chars == MAX_WORD_CHARS
    if vocabulary.kind == WORDPIECE:
        pieces = {piece: index for index, piece in enumerate(vocabulary.pieces)}
        tokenizer = BertWordPieceTokenizer(pieces, lowercase=vocabulary.lower_case)
        tokenizer._tokenizer.model.max_input_chars_per_word = vocabulary.max_word_chars
        tokenizer.save(str(folder / TOKENIZER))
    tokenizer_config = {
        # BertTokenizer ignores the word limit in `tokenizer.json`, so write this class only for the default limit.
        "tokenizer_class": "BertTokenizer" if is_bert else "PreTrainedTokenizerFast",
        "do_lower_case": vocabulary.lower_case,
        "model_max_length": config.max_row_tokens,
        "model_input_names": ["input_ids", *([_TYPE_IDS] if config.has_pair_segments else []), "attention_mask"],
        **special_tokens,
    }
    if vocabulary.kind == TOKENIZER_JSON:
        added = json.loads(content)["added_tokens"]
        special = [token["content"] for token in added if token["special"]]
        if extra := [token for token in special if token not in special_tokens.values()]:
            tokenizer_config[_OLD_EXTRA] = extra  # Versions 4 and 5 of transformers read this name.
    write_json(folder / CONFIG, tokenizer_config)
    write_json(folder / _SPECIAL_TOKENS, special_tokens)
    is_json = vocabulary.kind == TOKENIZER_JSON
    if is_json and config.has_pair_segments and not _row_form(vocabulary.engine(), ids)[2]:
        return ["in AutoTokenizer, both texts of a pair have segment 0, but the model uses segment 1 for the second"]
    return []
