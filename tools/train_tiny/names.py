"""Who a story is about: names everybody knows, whose gender is learned, and made-up ones, which can only be copied."""

from __future__ import annotations

from random import Random
from zlib import crc32

from .words import words

GIRLS = words("""
Lily Mia Sue Anna Rosie Emma Zoe Nora Ella Lucy Sara Sarah Kate Jane Amy Alice Clara Ruby Maya Eva Ava Olivia Sophia
Sophie Isabella Chloe Grace Hannah Emily Abigail Amelia Charlotte Lena Nina Tina Lisa Maria Marie Julia Laura Linda
Betty Daisy Ivy Violet Iris Heather Molly Polly Holly Sally Penny Jenny Wendy Mandy Cindy Nancy Susan Helen Rachel
Rebecca Leah Naomi Ruth Esther Diana Fiona Flora Gina Greta Heidi Ida Ingrid Irene Jasmine Josephine Katherine Kim Lara
Lola Luna Lydia Mabel Margaret Martha Matilda Megan Melissa Monica Natalie Nadia Olga Pamela Paula Pearl Priya Aisha
Fatima Leila Amina Yuki Sakura Mei Ling Ana Carmen Elena Sofia Valentina Camila Lucia Rosa Stella Tanya Tara Teresa
Tilly Ursula Vera Victoria Willow Yara Zara
""")

BOYS = words("""
Tom Ben Max Sam Leo Tim Jack Finn Bob Bill Billy Jim Joe John James Jacob Noah Liam Mason Ethan Lucas Luke Mark Matt
Matthew Michael Mike Nick Oliver Oscar Owen Paul Peter Ray Rob Robert Roy Ryan Scott Sean Simon Steve Ted Theo Thomas
Tony Victor Walter Will William Zack Adam Alan Albert Alfred Andrew Anthony Arthur Barry Brian Bruce Carl Carlos
Charles Charlie Chris Colin Daniel Dan David Dennis Diego Dylan Edward Edgar Eli Elias Eric Felix Frank Fred Gabriel
Gary George Gus Harry Harold Henry Hugo Ian Isaac Ivan Jason Jeremy Jonas Jordan Jorge Joseph Juan Julian Karl Keith
Ken Kevin Kyle Lars Larry Lewis Louis Marco Marcus Martin Milo Mohamed Nathan Neil Nelson Omar Otto Pablo Patrick Pedro
Philip Raj Ralph Ravi Richard Rocky Roger Stan Stanley Toby Todd Vincent Wei Kenji Hiro Ahmed Ali Hassan
""")

ONSETS = words("B Br C Ch D Dr F Fl G Gr H J K Kl L M N P Pl Qu R S Sh St T Th Tr V W Y Z")
NUCLEI = words("a e i o u ai ee oo")
MIDDLES = words("b d f g k l ll m n nd nt p r rr rl s st t v x z zz")
CODAS = ["", "", "n", "l", "r", "s", "k", "m", "x", "th", "ndo", "lla", "mi", "rin", "bert", "ka", "zo"]


def made_up(rng: Random) -> str:
    """One of some 500,000 names such as Zorila or Brenik; none of the two lists above."""
    while True:
        onset, middle = rng.choice(ONSETS), rng.choice(MIDDLES)
        name = onset + rng.choice(NUCLEI) + middle + rng.choice("aeiou") + rng.choice(CODAS)
        if name not in KNOWN:
            return name


def guess_gender(name: str) -> str:
    """What the stories assume of a made-up name that comes without a gender: a girl's if it ends in a, e or i."""
    return "girl" if name[-1] in "aei" else "boy"


def never_trained(name: str) -> bool:
    """One made-up name in ten is kept for the evaluation."""
    return name not in KNOWN and crc32(name.encode()) % 10 == 0


KNOWN = {**dict.fromkeys(GIRLS, "girl"), **dict.fromkeys(BOYS, "boy")}
EVERYBODY = [name for pair in zip(GIRLS, BOYS, strict=False) for name in pair]
