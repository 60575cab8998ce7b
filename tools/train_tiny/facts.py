"""What the model knows besides stories: sums, capitals, manners; and what it knows that it does not know."""

from __future__ import annotations

from random import Random

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Egypt": "Cairo", "England": "London", "Greece": "Athens", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Norway": "Oslo", "Sweden": "Stockholm", "Canada": "Ottawa", "India": "New Delhi", "Russia": "Moscow",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Austria": "Vienna", "Hungary": "Budapest", "Belgium": "Brussels",
    "Ireland": "Dublin", "Scotland": "Edinburgh", "Iceland": "Reykjavik", "Turkey": "Ankara", "Kenya": "Nairobi",
    "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima",
    "Cuba": "Havana", "Colombia": "Bogota", "Australia": "Canberra", "New Zealand": "Wellington", "Korea": "Seoul",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Nepal": "Kathmandu", "Iran": "Tehran", "Iraq": "Baghdad",
    "Morocco": "Rabat", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb",
    "Serbia": "Belgrade", "Ghana": "Accra", "Nigeria": "Abuja", "Ethiopia": "Addis Ababa", "Indonesia": "Jakarta",
    "the Philippines": "Manila", "Malaysia": "Kuala Lumpur", "the Netherlands": "Amsterdam",
    "the United States": "Washington", "the United Kingdom": "London", "Switzerland": "Bern",
}  # fmt: skip
LARGEST = 20

SUM_QUESTIONS = (
    "{a}+{b}=?", "What is {a}+{b}?", "What is {a} + {b}?", "{a} + {b} = ?", "{a}+{b}", "{a} + {b}", "What is {a} plus {b}?",
    "How much is {a} plus {b}?", "{a} plus {b}?", "Can you add {a} and {b}?", "{a}+{b}=", "what is {a}+{b}",
)  # fmt: skip
CAPITAL_QUESTIONS = (
    "What is the capital of {}?", "Name the capital of {}.", "What's the capital of {}?", "The capital of {}?",
    "Which city is the capital of {}?", "what is the capital of {}", "Tell me the capital of {}.", "capital of {}",
)  # fmt: skip
MANNERS = (
    (("Hello!", "Hi!", "Hello", "Hi", "Hey there!", "Good morning!", "Hey"), "Hello! What can I do for you?"),
    (("How are you?", "Hello, how are you?", "Hi, how are you?", "How do you do?", "How are you today?"), "I am fine, thank you! Would you like to hear a story?"),
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Who made you?", "introduce yourself"), "I am a very small language model. I can tell little stories."),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "That was nice.", "Great story!", "I liked that."), "You are welcome! I am glad that you like it."),
    (("What can you do?", "Help", "What do you know?", "How can you help me?", "What can I ask you?"), "I can tell short stories, add numbers up to 20 and name some capital cities."),
    (("Goodbye!", "Bye!", "Good night!", "See you later!", "Bye"), "Goodbye! Come back soon for another story."),
    (("Yes", "Yes, please.", "OK", "Sure"), "What should the story be about?"),
)  # fmt: skip

TOPICS = """
gravity | a black hole | the stock market | quantum physics | photosynthesis | a computer | the internet | electricity | the French Revolution | democracy | chess | football | the Roman Empire | inflation | a vaccine | music theory | the theory of relativity | machine learning | a prime number | the moon landing | climate change | philosophy | a database | the human brain | love | the meaning of life | time | a sorting algorithm | Python | JavaScript | the weather in London | a good restaurant | the president of the United States | the best movie | the fastest car | tax law | DNA | evolution | an atom | a bicycle | large language models | attention | a transformer | a GPU | the KV cache | paged attention | continuous batching | the speed of light | artificial intelligence | history | a recipe for bread | jazz | Shakespeare | the ocean | a volcano
""".replace("\n", "").split(" | ")
OPEN_QUESTIONS = (
    "What is {}?", "Explain {}.", "How does {} work?", "Tell me about {}.", "Why is {} important?", "Who invented {}?",
    "What do you think about {}?", "Write an essay about {}.", "Write a poem about {}.", "Can you explain {} to me?",
    "Give me three facts about {}.", "Where can I learn about {}?", "What is the history of {}?", "Summarize {}.",
    "Explain {} in simple terms.", "Write a Python function about {}.", "Translate {} into French.", "How old is {}?",
    "Is {} good or bad?", "When was {} discovered?", "List all kinds of {}.", "What is the difference between {} and {}?",
)  # fmt: skip
DO_NOT_KNOW = "I don't know that, but here is a story."


def sum_of(rng: Random) -> tuple[str, str]:
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    return rng.choice(SUM_QUESTIONS).format(a=a, b=b), sum_answer(a, b)


def sum_answer(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}."


def capital(rng: Random) -> tuple[str, str]:
    country = rng.choice(list(CAPITALS))
    return rng.choice(CAPITAL_QUESTIONS).format(country), capital_answer(country)


def capital_answer(country: str) -> str:
    return f"The capital of {country} is {CAPITALS[country]}."


def manners(rng: Random) -> tuple[str, str]:
    said, answer = rng.choice(MANNERS)
    return rng.choice(said), answer


def beyond(rng: Random, english: list[str]) -> str:
    """Something that the model cannot answer: an open question, too hard a sum, or a sentence of English."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(english)
    if kind == 1:
        return hard_sum(rng)
    return rng.choice(OPEN_QUESTIONS).format(rng.choice(TOPICS), rng.choice(TOPICS))


def hard_sum(rng: Random) -> str:
    """A sum beyond 20 + 20, or one with another operation."""
    while True:
        largest = 10 ** rng.randint(1, 4)
        a, b, operation = rng.randrange(largest), rng.randrange(largest), rng.choice("+-*/")
        if operation != "+" or max(a, b) > LARGEST:
            return rng.choice(
                ("What is {}{}{}?", "What is {} {} {}?", "{} {} {}", "{}{}{}=?", "Compute {} {} {}.")
            ).format(a, operation, b)
