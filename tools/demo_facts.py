"""The facts that a user of the demo model tells, with the words and names they are made of.

Names are split by hash into those that training may use and those that it never sees, so that "a
name that occurs nowhere in the training text" is a property of the name, not of a run.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REAL_NAMES = """
Ana Ben Carla Dmitri Eva Farid Grace Hugo Ines Jon Kira Leo Maya Nina Omar Paul Rosa Sam Tina Yara \
Alice Bob Emma
Noah Liam Olivia Lucas Mia Zoltan Petra Wendy Igor Kwame Ulrich Vera Xander Quinn Fiona Gustav \
Helga Helena Viktor
Amara Joris Sunniva Pedro Keiko Tomas Brunhilde Nguyen Szymon Anneke Bjork Oyelaran Siobhan Peter \
Anna Maria John
James Mary Robert Linda David Susan Thomas Karen Daniel Nancy Matthew Lisa Anthony Mark Sandra \
Steven Andrew Emily
Joshua Kevin Brian George Edward Ronald Timothy Jason Jeffrey Ryan Jacob Gary Nicholas Eric \
Jonathan Stephen Larry
Justin Scott José Zoë Björn Søren Łukasz Chloé Jürgen André Noël Renée
""".split()
CITIES = (
    "Paris London Rome Tokyo Berlin Madrid Lima Oslo Cairo Delhi Boston Dublin Vienna Prague "
    "Athens Zürich"
).split()
ONSETS = [
    *(
        "b br c ch cl cr d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl st str t th "
        "tr v vl w x y z zh"
    ).split(),
    "",
    "",
    "",
]
VOWELS = "a e i o u y ai au ea ee ei ia ie io oa ou oo ue".split()
CODAS = ["", "", "", "", *"n s l r t m k x d th nd rt sh ng ck".split()]
COLORS = "red blue green yellow black white orange purple pink brown grey silver".split()
PETS = "dog cat parrot rabbit horse hamster turtle goat fish snake".split()
FOODS = "pizza pasta rice soup cheese curry bread salad apples noodles tacos cake".split()
JOBS = "teacher doctor baker driver nurse painter farmer pilot lawyer cook writer engineer".split()
WORDS = [
    *COLORS,
    *PETS,
    *FOODS,
    "sun",
    "moon",
    "tree",
    "river",
    "stone",
    "lamp",
    "chair",
    "train",
    "book",
    "cloud",
]
NUMBERS = "zero one two three four five six seven eight nine ten".split()


def is_held_out(name: str) -> bool:
    """True for the eighth of all names that never occurs in the training text."""
    return zlib.crc32(name.lower().encode()) % 8 == 0


def invented_name(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return "".join(
            rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8))
        ).capitalize()
    syllables = (
        rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(CODAS) if rng.random() < 0.3 else "")
        for _ in range(rng.randint(1, 3))
    )
    return "".join(syllables).capitalize() + rng.choice(CODAS)


def name_for(rng: random.Random, held_out: bool, known: Sequence[str] = REAL_NAMES) -> str:
    while True:
        name = rng.choice(known) if rng.random() < 0.25 else invented_name(rng)
        if len(name) >= (4 if held_out else 2) and is_held_out(name) == held_out:
            return name


@dataclass(frozen=True)
class Fact:
    """One kind of fact: how a user tells it, asks for it, and how the assistant answers."""

    told: tuple[str, ...]
    asked: tuple[str, ...]
    noted: tuple[str, ...]
    answer: str
    system: str
    values: Sequence[str] = ()
    is_name: bool = False
    make: Callable[[random.Random], str] | None = None

    def value(self, rng: random.Random, held_out: bool) -> str:
        if self.make is not None:
            return self.make(rng)
        if self.is_name:
            return name_for(rng, held_out, self.values or REAL_NAMES)
        return rng.choice(self.values)


FACTS: dict[str, Fact] = {
    "name": Fact(
        (
            "My name is {}.",
            "I am {}.",
            "Call me {}.",
            "Hi, I am called {}.",
            "Hello, my name is {}.",
            "I'm {}.",
        ),
        (
            "What is my name?",
            "Who am I?",
            "Do you remember my name?",
            "Tell me my name.",
            "What's my name?",
            "What am I called?",
        ),
        ("Nice to meet you, {}.", "Hello, {}.", "Nice to meet you."),
        "Your name is {}.",
        "The user's name is {}.",
        is_name=True,
    ),
    "city": Fact(
        ("I live in {}.", "My city is {}.", "I moved to {}.", "My home is in {}."),
        (
            "Where do I live?",
            "What is my city?",
            "Which city do I live in?",
            "What city do I live in?",
        ),
        ("{} sounds lovely.", "I will remember {}.", "That sounds lovely."),
        "You live in {}.",
        "The user lives in {}.",
        CITIES,
        is_name=True,
    ),
    "friend": Fact(
        ("My best friend is {}.", "My friend is called {}.", "I have a friend named {}."),
        ("Who is my best friend?", "What is my friend called?", "What is the name of my friend?"),
        ("Say hello to {}.", "Friends are important."),
        "Your friend is {}.",
        "The user's best friend is {}.",
        is_name=True,
    ),
    "petname": Fact(
        ("My pet is called {}.", "The name of my pet is {}.", "My pet's name is {}."),
        ("What is my pet called?", "What is the name of my pet?", "What's the name of my pet?"),
        ("{} is a sweet name.", "What a sweet name."),
        "Your pet is called {}.",
        "The user's pet is called {}.",
        is_name=True,
    ),
    "color": Fact(
        ("My favorite color is {}.", "I like the color {}.", "I love the color {}."),
        ("What is my favorite color?", "Which color do I like?", "What color do I like?"),
        ("I like {} too.", "A nice color."),
        "Your favorite color is {}.",
        "The user's favorite color is {}.",
        COLORS,
    ),
    "pet": Fact(
        ("I have a {}.", "My pet is a {}.", "I got a {}."),
        ("What pet do I have?", "What is my pet?", "Which animal do I have?"),
        ("A {} is a good friend.", "How nice."),
        "You have a {}.",
        "The user has a {}.",
        PETS,
    ),
    "food": Fact(
        ("I love to eat {}.", "My favorite food is {}.", "I like {} most of all."),
        ("What is my favorite food?", "What do I love to eat?", "Which food do I like?"),
        ("I would like some {} too.", "That is tasty."),
        "Your favorite food is {}.",
        "The user loves to eat {}.",
        FOODS,
    ),
    "job": Fact(
        ("I work as a {}.", "My job is {}.", "My work is being a {}."),
        ("What is my job?", "What do I do for work?", "What do I work as?"),
        ("Being a {} is hard work.", "That is hard work."),
        "You work as a {}.",
        "The user works as a {}.",
        JOBS,
    ),
    "code": Fact(
        ("My code is {}.", "Remember the number {}.", "The secret number is {}."),
        (
            "What is my code?",
            "Which number did I ask you to remember?",
            "What is the secret number?",
        ),
        ("Okay, I noted {}.", "Noted."),
        "The number is {}.",
        "The secret number is {}.",
        make=lambda rng: str(rng.randint(10, 99999)),
    ),
    "age": Fact(
        ("I am {} years old.", "My age is {}."),
        ("How old am I?", "What is my age?"),
        ("{} is a good age.", "A good age."),
        "You are {} years old.",
        "The user is {} years old.",
        make=lambda rng: str(rng.randint(5, 99)),
    ),
}
NOT_TOLD = "You have not told me that."
