"""Find the word vectors a run starts from, and hand them to the model."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers import Vocabulary, WordVectors, read_word_vectors, sentence_vectors
from pyg_dynbatch.training.options import VectorOptions

_SEEDS = 2**31


def check_vectors(options: VectorOptions) -> None:
    """Looks for the file of word vectors, before any data are read.

    Args:
        options: Where the vectors come from.

    Raises:
        ValueError: If no file is given.
        FileNotFoundError: If there is no such file.
    """
    if options.source != "glove":
        return
    if options.file is None:
        raise ValueError(
            mismatch(
                "VectorOptions: source 'glove' needs a file",
                expected="file: a text file of vectors, also .gz",
                got="no file",
                mend="--data.init_args.vectors.file glove.840B.300d.txt",
            )
        )
    if not Path(options.file).is_file():
        raise FileNotFoundError(
            mismatch(
                "VectorOptions: the file of word vectors is missing",
                expected="a text file of vectors, also .gz",
                got=options.file,
                mend="--data.init_args.vectors.file FILE, or .source none to do without",
            )
        )


def load_vectors(options: VectorOptions, vocabulary: Vocabulary) -> WordVectors | None:
    """Reads the vectors of a vocabulary.

    Args:
        options: Where they come from.
        vocabulary: The words of the data set.

    Returns:
        The vectors, or ``None`` if the model is to use its own.

    Raises:
        ValueError: If no file is given, or it cannot be read.
        FileNotFoundError: If there is no such file.
    """
    if options.source == "none":
        return None
    if options.source == "sentence":
        model: dict[str, Any] = {} if options.file is None else {"model": options.file}
        return sentence_vectors(vocabulary, cache=options.cache, scale=options.scale, **model)
    check_vectors(options)
    file: Any = options.file
    vectors = read_word_vectors(
        file,
        vocabulary,
        missing=options.missing,
        lower_case=options.lower_case,
        # Drawn from the seed of the run, so that runs with several seeds differ here too.
        seed=torch.initial_seed() % _SEEDS,
    )
    return vectors.scaled(options.scale)


def set_vectors(embedding: nn.Embedding, matrix: Float[Tensor, "row feature"]) -> None:
    """Copies word vectors into an embedding.

    Args:
        embedding: The model's embedding.
        matrix: One vector a row of the vocabulary.

    Raises:
        ValueError: If the embedding has another shape.

    Example:
        >>> embedding = nn.Embedding(2, 3)
        >>> set_vectors(embedding, torch.ones(2, 3))
        >>> embedding.weight.sum().item()
        6.0
    """
    if embedding.weight.shape != matrix.shape:
        raise ValueError(
            mismatch(
                "word vectors: they do not fit the model's embedding",
                expected=f"{embedding.num_embeddings} words, {embedding.embedding_dim} wide",
                got=f"{matrix.size(0)} words, {matrix.size(1)} wide",
                mend=f"--model.init_args.embedding_channels {matrix.size(1)}",
            )
        )
    with torch.no_grad():
        embedding.weight.copy_(matrix)
