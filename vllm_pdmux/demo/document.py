# SPDX-License-Identifier: Apache-2.0
"""The long document: a light keeper's log, written for this demo, the same at every run and as long as asked for."""

from collections.abc import Iterator
from datetime import date, timedelta
from itertools import islice

QUESTION = "Who built the light at Karrow Point?"

# The answer stands at the beginning, so that nothing but attention over the whole document finds it.
_OPENING = (
    "The log of the light at Karrow Point, copied fair by its keeper.",
    "The light was built by Ines Halloran, a mason of the islands, out of grey granite, and first lit in October 1871.",
    "It stands ninety feet above the sea, and in clear weather it is seen from fifteen miles.",
    "Two keepers live here, Tobias Wren and his daughter Maud, with a goat and a great many books.",
    "What follows was written down each evening before the lamp was lit.",
)

# The lists have lengths without a common factor, so that an entry comes back only after 5 x 7 x 11 x 13 days.
_WINDS = (
    "Wind from the south-west all day, and the sea grey and short.",
    "A still morning, with the smoke of the kitchen going straight up.",
    "Hard northerly wind, and spray as high as the gallery windows.",
    "Thick fog until noon, so that we rang the bell every two minutes.",
    "Clear and cold, and the hills of the mainland looked near enough to touch.",
)
_PASSINGS = (
    "Three herring boats passed close under the rocks and their crews waved to us.",
    "The mail steamer went by an hour late, with her deck lamps already burning.",
    "A brig with a patched topsail stood off the point and waited for the tide.",
    "Nothing passed but a line of gannets, going north.",
    "A barge of slate anchored in the lee, and her master came ashore for water.",
    "Two coal ships went south together, and the second one was leaking smoke.",
    "We counted eleven sail before supper, more than on any day this month.",
)
_WORKS = (
    "Polished the lens with chalk and soft leather, which takes both of us the whole morning.",
    "Carried nine cans of oil up the stair and found the last one half empty.",
    "Painted the east railing, and it rained before the paint was dry.",
    "Took the clockwork apart, cleaned the teeth of the great wheel, and set it going again.",
    "Mended the roof of the goat's shed with a plank from the beach.",
    "Trimmed the wicks and wrote to the office for new ones.",
    "Cut peat behind the garden wall and stacked it to dry.",
    "Swept salt from the gallery and washed the north panes.",
    "Cleared the gutter, which had a gull's nest in it, happily an old one.",
    "Greased the hinges of the sea door and put a new rope on the crane.",
    "Whitewashed the stair from the first landing to the third.",
)
_EVENINGS = (
    "Maud read aloud from a book about volcanoes.",
    "The lamp burned evenly and used four pints of oil.",
    "We ate the last of the winter cabbages and were not sorry.",
    "A letter came at last from my brother, who keeps bees in a dry country.",
    "The goat got into the oil store and had to be led out by the horn.",
    "At midnight a small bird struck the glass, rested on the rail and flew on.",
    "Played draughts, and Maud won twice.",
    "I mended my boots and thought about the price of leather.",
    "The barometer fell so fast that we tied down the boat.",
    "Heard singing over the water, but saw no boat.",
    "Baked two loaves, and burned one of them while looking at the sunset.",
    "Seals lay on the low rocks and watched us like an audience.",
    "The stars were very bright, and I showed Maud how to find the Pole.",
)


def text(sentences: int, question: str = QUESTION) -> str:
    """The first `sentences` sentences of the log, and the question at its end."""
    return f"{' '.join(islice(_sentences(), sentences))}\n\n{question}"


def shortest() -> int:
    """Sentences of the opening: the document must have these."""
    return len(_OPENING)


def _sentences() -> Iterator[str]:
    """Without an end."""
    yield from _OPENING
    day, number = date(1874, 3, 2), 0
    while True:
        yield f"\n{day.day} {day:%B}. {_WINDS[number % len(_WINDS)]}"
        for lines in (_PASSINGS, _WORKS, _EVENINGS):
            yield lines[number % len(lines)]
        day, number = day + timedelta(days=1), number + 1
