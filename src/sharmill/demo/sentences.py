"""English sentences for the demo corpus, made from a small grammar: varied and plain, numbers spelled out.

A rule is a list of alternatives; ``{name}`` in an alternative stands for one alternative of the rule
``name``. The four starting rules differ in length only, so that a corpus has short and long utterances in a
known mix.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Final

_RULES: Final[dict[str, list[str]]] = {
    "short": [
        "{person} {did_alone}.",
        "Where is the {thing}?",
        "{person} has {number} {things}.",
        "Bring the {thing} {place}, please.",
        "It was {feeling} {time}.",
        "Nobody saw {person} {time}.",
    ],
    "medium": [
        "{person} {did_thing} the {adjective} {thing} {place}.",
        "{time_first}, {person} {did_alone} {place} with {number} {things}.",
        "Why did {person} leave the {adjective} {thing} {place}?",
        "The {adjective} {thing} costs {number} dollars and {number} cents.",
        "{person} and {person} {did_alone} {place} {time}.",
        "My {relative} {did_thing} {number} {things} and {number} {things} {time}.",
        "The train to {town} leaves from platform {number} {time}.",
        "There were only {number} {things} left {place} when {person} {did_alone}.",
    ],
    "long": [
        "{time_first}, {person} {did_thing} the {adjective} {thing} {place}, {because}.",
        "{person} {did_alone} {place}, but {person} {did_thing} {number} {things} and was sorry {time}.",
        "If you ever go to {town}, ask my {relative} about the {adjective} {thing}, {because}.",
        "From {town} to {town} it is {number} miles by the {adjective} road, {because}.",
        "We counted {number} {things}, {number} {things} and one {adjective} {thing} {place}, {because}.",
        "The {thing} was {feeling}, so {person} {did_thing} it {time}, and my {relative} {did_alone}.",
        "When {person} {did_alone}, the {adjective} {thing} was gone, and {number} {things} lay {place}.",
    ],
    "longest": [
        "{time_first}, {person} {did_thing} {number} {things} {place}, {because}, and {person} {did_alone}.",
        "{person} {did_alone} {time}, {because}, but the {thing} {place} was {feeling}, {because}.",
        "My {relative}, who {did_alone} {place} {time}, {did_thing} the {adjective} {thing}, {because}.",
    ],
    "because": [
        "because the {thing} was {feeling}",
        "although nobody had asked for {number} {things}",
        "while {person} {did_alone} {place}",
        "so {person} {did_thing} the {things} {time}",
        "and {number} people from {town} {did_alone}",
    ],
    "person": [
        "Martha",
        "Oliver",
        "Captain Reed",
        "Doctor Lane",
        "Sofia",
        "Edwin",
        "Missus Hale",
        "young Thomas",
        "Rosa",
        "Professor Quill",
        "Jonas",
        "Beatrice",
        "Mister Okafor",
        "Priya",
        "Walter",
        "Aunt Judith",
        "Felix",
        "Naomi",
    ],
    "relative": [
        "sister",
        "uncle",
        "grandmother",
        "cousin",
        "neighbour",
        "oldest brother",
        "daughter",
        "teacher",
    ],
    "town": ["Ashford", "Millbrook", "Kestrel Bay", "Norwood", "Vienna", "Lisbon", "Silver Creek", "Dundee"],
    "did_alone": [
        "laughed out loud",
        "fell asleep",
        "waited quietly",
        "sang an old song",
        "turned around",
        "went home early",
        "learned to swim",
        "lost a shoe",
        "told a joke",
        "made some tea",
        "missed the bus",
        "got lost again",
    ],
    "did_thing": [
        "painted",
        "carried",
        "sold",
        "repaired",
        "found",
        "hid",
        "borrowed",
        "measured",
        "cleaned",
        "forgot",
        "photographed",
        "bought",
        "wrapped",
        "collected",
    ],
    "adjective": [
        "crooked",
        "yellow",
        "heavy",
        "narrow",
        "broken",
        "famous",
        "wooden",
        "quiet",
        "enormous",
        "frozen",
        "dusty",
        "velvet",
        "curious",
        "ancient",
        "shiny",
        "hollow",
    ],
    "thing": [
        "lantern",
        "violin",
        "bicycle",
        "kettle",
        "map",
        "clock",
        "umbrella",
        "rowing boat",
        "telescope",
        "piano",
        "ladder",
        "garden gate",
        "letter",
        "suitcase",
        "chimney",
        "weather vane",
    ],
    "things": [
        "apples",
        "candles",
        "geese",
        "buttons",
        "postcards",
        "horses",
        "pencils",
        "chairs",
        "feathers",
        "spoons",
        "tickets",
        "mushrooms",
        "shells",
        "loaves of bread",
        "blankets",
        "jars of honey",
    ],
    "number": [
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "eleven",
        "twelve",
        "fifteen",
        "nineteen",
        "twenty",
        "twenty six",
        "thirty one",
        "forty",
        "fifty eight",
        "sixty two",
        "ninety nine",
        "one hundred",
        "two hundred",
    ],
    "place": [
        "behind the barn",
        "near the harbour",
        "on the kitchen table",
        "under the old bridge",
        "beside the river",
        "at the edge of the forest",
        "in the village square",
        "on the roof",
        "outside the library",
        "in the cellar",
        "across the meadow",
        "by the lighthouse",
    ],
    "time": [
        "yesterday",
        "before breakfast",
        "at half past nine",
        "last winter",
        "on Tuesday morning",
        "after the storm",
        "every evening",
        "just before midnight",
        "in early spring",
        "twice a week",
    ],
    "time_first": [
        "Last summer",
        "On Friday",
        "After lunch",
        "Long ago",
        "One rainy afternoon",
        "In the middle of the night",
        "At five o'clock",
        "Every other Sunday",
        "Before the concert",
        "Early this year",
    ],
    "feeling": [
        "too cold",
        "very strange",
        "almost perfect",
        "far too loud",
        "quite safe",
        "worth the trouble",
    ],
}

# Half of the sentences are long: a context for a zero-shot model should last three seconds or more.
_LENGTHS: Final = ("long", "medium", "longest", "medium", "long", "short", "long", "medium")
_MAX_WORDS: Final = 30
_SLOT: Final = re.compile(r"\{(\w+)\}")


def sentences(*, seed: int) -> Iterator[str]:
    """Distinct sentences of 3 to 30 words without end, the same for the same seed.

    >>> first = list(itertools.islice(sentences(seed=1), 100))
    >>> len(set(first)), first[0].endswith(".")
    (100, True)
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    for length in itertools.cycle(_LENGTHS):
        sentence = _expand(f"{{{length}}}", rng)
        while sentence in seen or len(sentence.split()) > _MAX_WORDS:
            sentence = _expand(f"{{{length}}}", rng)
        seen.add(sentence)
        yield sentence[0].upper() + sentence[1:]


def _expand(template: str, rng: random.Random) -> str:
    used: set[str] = set()
    # No phrase twice in one sentence: "Rosa and Rosa waited" is not what people say.
    while slot := _SLOT.search(template):
        alternatives = [text for text in _RULES[slot[1]] if text not in used]
        text = rng.choice(alternatives)
        used.add(text)
        template = template[: slot.start()] + text + template[slot.end() :]
    return template
