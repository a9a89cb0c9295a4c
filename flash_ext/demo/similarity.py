"""Real input: sentence similarities by an encoder whose attention is flash_ext's, against the unmodified encoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext.demo.encoder import Encoder

TOLERANCE = 5e-3

# Chosen so that the similarities of one sentence to any two others differ by at least 0.004 in fp32: their ranking has
# a right answer.
SENTENCES = (
    "A cat sleeps on the windowsill.",
    "The kitten naps in the sun by the window.",
    "The lion is the king of the savanna.",
    "A man is playing the guitar on stage.",
    "A musician performs a song with his band.",
    "The film was far too long, and I fell asleep before the end.",
    "The stock market fell sharply on Monday.",
    "Shares dropped after the central bank raised interest rates.",
    "Inflation makes bread more expensive.",
    "Knead the dough for ten minutes and let it rest.",
    "This recipe needs two eggs, flour and a pinch of salt.",
    "Tomorrow will be sunny and warm.",
)


@dataclass(frozen=True)
class Line:
    """One sentence: its closest other sentence, both similarities to it, and how its row of similarities compares.

    Attributes
    ----------
    sentence, closest : str
    plain, ours : float
        Cosine similarity to ``closest`` by the unmodified encoder in fp32 and by the one with flash_ext's attention.
    difference : float
        Largest absolute difference of the sentence's similarities to the others.
    same_ranking : bool
        Whether both encoders order the other sentences alike.
    """

    sentence: str
    closest: str
    plain: float
    ours: float
    difference: float
    same_ranking: bool

    @property
    def within(self) -> bool:
        return self.difference <= TOLERANCE and self.same_ranking


def compare_similarities(plain: Tensor, ours: Tensor, sentences: tuple[str, ...] = SENTENCES) -> list[Line]:
    """Compares two sets of embeddings, each ``(sentences, hidden)`` of unit length, sentence by sentence."""
    expected, got = plain.double() @ plain.double().T, ours.double() @ ours.double().T
    lines = []
    for index, sentence in enumerate(sentences):
        others = [other for other in range(len(sentences)) if other != index]
        row, own = expected[index, others], got[index, others]
        ranking, own_ranking = row.argsort(descending=True), own.argsort(descending=True)
        closest = others[int(ranking[0])]
        lines.append(
            Line(
                sentence,
                sentences[closest],
                float(expected[index, closest]),
                float(got[index, closest]),
                # NaN stays NaN, which is not within the tolerance.
                float((row - own).abs().max()),
                torch.equal(ranking, own_ranking),
            )
        )
    return lines


def run_similarities(encoder: Encoder) -> list[Line]:
    """Embeds the sentences in both ways and compares."""
    sentences = list(SENTENCES)
    with torch.no_grad():
        plain, ours = encoder.embed_with_plain_attention(sentences), encoder.embed_with_flash_ext(sentences)
    return compare_similarities(plain, ours)
