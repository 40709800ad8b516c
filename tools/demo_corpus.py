"""The conversations that the demo model is trained and judged on: made by rule, from a seed.

Knows nothing about tokens, models or training. A dialogue is a list of messages plus the questions
in it whose answer is a fact told earlier.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from demo_facts import COLORS, FACTS, FOODS, JOBS, NOT_TOLD, NUMBERS, PETS, WORDS, name_for
from demo_small_talk import small_talk as free_talk

Message = dict[str, str]


_SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi.", "Hello.", "Hey!"), "Hello! How can I help you?"),
    (("How are you?", "How do you do?", "How is it going?"), "I am fine, thank you."),
    (("Thanks.", "Thank you.", "Thanks a lot!", "Thank you very much."), "You are welcome."),
    (
        ("Tell me a joke.", "Do you know a joke?"),
        "Why did the fish blush? It saw the bottom of the sea.",
    ),
    (("What can you do?", "How can you help me?", "Help."), "I can remember what you tell me."),
    (("It is raining today.", "Look at the rain."), "Take an umbrella."),
    (("Good morning.", "Good morning!"), "Good morning to you."),
    (("Good night.", "Good evening."), "Have a good evening."),
    (("I am tired.", "I feel sleepy."), "You should rest a little."),
    (("I am hungry.", "I want to eat."), "Time for a snack."),
    (("I am bored.", "There is nothing to do."), "How about a walk?"),
    (("I am happy today.", "What a great day!"), "I am glad to hear that."),
    (("I am sad.", "I feel bad today."), "I am sorry to hear that."),
    (("Who are you?", "What are you?", "What is your name?"), "I am a very small demo model."),
    (("Are you smart?", "What do you know?"), "I am only a toy, but I listen well."),
    (("Do you like music?", "Sing a song."), "I like quiet songs."),
    (("The sun is shining.", "It is warm today."), "Enjoy the sun."),
    (("It is cold.", "It is snowing."), "Put on a warm coat."),
    (("I am going to work.", "I have to work now."), "Have a good day at work."),
    (("I am back.", "Here I am again."), "Welcome back."),
    (("Wait a moment.", "One moment please."), "Take your time."),
    (("Let us talk.", "Talk to me."), "I am listening."),
    (("That is nice.", "Great!", "Very good.", "Cool."), "I am happy you like it."),
    (("Okay.", "Ok.", "Yes.", "I see."), "All right."),
    (("No.", "I do not think so."), "As you wish."),
    (("I read a book.", "I am reading."), "Books are good company."),
    (("I watched a film.", "I saw a film."), "I hope it was a good one."),
    (("What should I do?", "Give me advice."), "Take one step at a time."),
    (("I went for a walk.", "I was outside."), "Fresh air is good for you."),
    (("What is the weather?", "Will it rain?"), "I can not see the sky from here."),
)
_STYLES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Talk like a pirate.", "You are a pirate.", "Answer like a pirate."), "Arr! {}"),
    (
        ("Be polite.", "Always be very polite.", "You are a polite assistant."),
        "{} Have a nice day.",
    ),
    (("Be brief.", "Answer in one word.", "Keep answers short."), "brief"),
)
_PLAIN_SYSTEM = ("You are a helpful assistant.", "You are a friendly assistant.", "Help the user.")


@dataclass(frozen=True)
class Recall:
    """The answer in `messages[index]` has to contain `word`.

    `unseen`: a name that training never saw.
    """

    index: int
    kind: str
    word: str
    unseen: bool


@dataclass
class Dialogue:
    messages: list[Message] = field(default_factory=list)
    recalls: list[Recall] = field(default_factory=list)


def dialogue(
    rng: random.Random,
    *,
    max_facts: int = 3,
    small_talk: float = 0.25,
    filler: int = 0,
    held_out: bool = False,
) -> Dialogue:
    """One conversation.

    A fifth begins with small talk, as strangers do, and half of these tell no fact at all.
    `small_talk`: chance of another small-talk turn after each fact. `filler`: small-talk turns
    among the questions that follow, for recall over a long distance. `held_out`: names come from
    the part that training never sees.
    """
    return _Writer(rng, held_out).write(max_facts, small_talk, filler)


class _Writer:
    def __init__(self, rng: random.Random, held_out: bool) -> None:
        self.rng, self.held_out = rng, held_out
        self.out, self.values, self.style = Dialogue(), {}, "{}"  # type: ignore[var-annotated]
        self.lower = rng.random() < 0.15
        self.bare = rng.random() < 0.15

    def write(self, max_facts: int, small_talk: float, filler: int) -> Dialogue:
        rng = self.rng
        kinds = rng.sample(list(FACTS), rng.randint(1, max_facts))
        if rng.random() < 0.4:
            kinds = self._system(kinds)
        if not filler and rng.random() < 0.2:
            for _ in range(rng.randint(1, 4)):
                self._turn_of(*free_talk(rng))
            if rng.random() < 0.5:
                return self.out
        for kind in kinds:
            self._tell(kind)
            while rng.random() < small_talk:
                self._aside()
        questions = rng.randint(1, max_facts + 1) + filler // 8
        pauses = [rng.random() for _ in range(filler)]
        for question in range(questions):
            for _ in range(sum(question <= p * questions < question + 1 for p in pauses)):
                self._aside()
            self._ask()
            if rng.random() < 0.12 and self.values:
                self._tell(rng.choice(list(self.values)), again=True)
            while rng.random() < small_talk * 0.5:
                self._aside()
        return self.out

    def _turn(self, user: str, answer: str) -> None:
        if self.lower:
            user = user.lower()
        if self.bare and user[-1] in ".?!":
            user = user[:-1]
        self.out.messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": answer},
        ]

    def _turn_of(self, user: str, answer: str) -> None:
        self._turn(user, self._styled(answer))

    def _styled(self, answer: str) -> str:
        return answer if self.style == "brief" else self.style.format(answer)

    def _system(self, kinds: list[str]) -> list[str]:
        rng, lines = self.rng, []
        if rng.random() < 0.5:
            prompts, self.style = rng.choice(_STYLES)
            lines.append(rng.choice(prompts))
        elif rng.random() < 0.5:
            lines.append(rng.choice(_PLAIN_SYSTEM))
        if rng.random() < 0.5 or not lines:
            kind, *rest = kinds
            self.values[kind] = FACTS[kind].value(rng, self.held_out)
            lines.append(FACTS[kind].system.format(self.values[kind]))
            kinds = rest
        rng.shuffle(lines)
        self.out.messages.append({"role": "system", "content": " ".join(lines)})
        return kinds

    def _value(self, kind: str) -> str:
        value = FACTS[kind].value(self.rng, self.held_out)
        return value.lower() if self.lower else value

    def _tell(self, kind: str, again: bool = False) -> None:
        fact, value = FACTS[kind], self._value(kind)
        self.values[kind] = value
        told = self.rng.choice(fact.told).format(value)
        if again and self.rng.random() < 0.5:
            told = (
                "Now " + told[0].lower() + told[1:] if not told.startswith("I") else "Now " + told
            )
        self._turn(told, self._styled(self.rng.choice(fact.noted).format(value)))

    def _aside(self) -> None:
        if self.rng.random() < 0.25:
            self._turn_of(*free_talk(self.rng))
        elif self.rng.random() < 0.65:
            asked, answer = self.rng.choice(_SMALL_TALK)
            self._turn(self.rng.choice(asked), self._styled(answer))
        else:
            self._turn(
                *self.rng.choice((self._repeat, self._say, self._count, self._list, self._items))()
            )

    def _ask(self) -> None:
        kind = (
            self.rng.choice(list(FACTS))
            if self.rng.random() < 0.12 or not self.values
            else self.rng.choice(list(self.values))
        )
        fact, question = FACTS[kind], self.rng.choice(FACTS[kind].asked)
        if kind not in self.values:
            self._turn(question, self._styled(NOT_TOLD))
            return
        value = self.values[kind]
        answer = f"{value}." if self.style == "brief" else self._styled(fact.answer.format(value))
        self._turn(question, answer)
        self.out.recalls.append(
            Recall(len(self.out.messages) - 1, kind, value, self.held_out and fact.is_name)
        )

    def _words(self, low: int, high: int) -> list[str]:
        return [
            self.rng.choice(WORDS) if self.rng.random() < 0.6 else name_for(self.rng, False).lower()
            for _ in range(self.rng.randint(low, high))
        ]

    def _repeat(self) -> tuple[str, str]:
        words = " ".join(self._words(1, 5))
        return self.rng.choice(("Repeat: {}", "Say this: {}", "Repeat after me: {}")).format(
            words
        ), words

    def _say(self) -> tuple[str, str]:
        (word,), times = self._words(1, 1), self.rng.randint(2, 4)
        return f"Say {word} {NUMBERS[times]} times.", " ".join([word] * times)

    def _count(self) -> tuple[str, str]:
        last = self.rng.randint(2, 10)
        return f"Count to {NUMBERS[last] if self.rng.random() < 0.5 else last}.", ", ".join(
            map(str, range(1, last + 1))
        )

    def _list(self) -> tuple[str, str]:
        what, words = self.rng.choice(
            (("colors", COLORS), ("animals", PETS), ("foods", FOODS), ("jobs", JOBS))
        )
        count = self.rng.randint(2, 5)
        return f"{self.rng.choice(('Name', 'List'))} {NUMBERS[count]} {what}.", ", ".join(
            words[:count]
        )

    def _items(self) -> tuple[str, str]:
        words = self._words(2, 4)
        return f"Make a list: {', '.join(words)}", "\n".join(
            f"{i}. {word}" for i, word in enumerate(words, 1)
        )
