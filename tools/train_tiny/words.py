"""The open word lists. All nouns are singular and take "a" or "an", so that one set of templates fits them all."""


def words(text: str) -> list[str]:
    """The words of a text; a hyphen stands for the space within a compound."""
    return [word.replace("-", " ") for word in text.split()]


COLORS = words("""
red blue green yellow orange purple pink white black brown gray golden silver violet turquoise scarlet crimson teal
lilac maroon beige ivory navy emerald ruby amber copper bronze lavender cherry lemon peach rose mint cream coral
plum olive tan indigo
""")

SIZES = words("small big tiny little shiny old new round soft huge pretty wooden lovely strange long heavy")

ADJECTIVES = words("""
happy brave kind clever curious quiet funny small shy gentle cheerful friendly careful polite lively patient bold
honest playful sleepy hungry smart strong silly proud busy calm dreamy eager fast good helpful jolly lazy loud lucky
merry messy neat nice noisy polished quick sad serious sweet tall thoughtful tidy tiny tired warm wild wise young
grumpy generous stubborn sunny bright lonely hopeful adventurous creative
""")

THINGS = words("""
kite ball boat doll drum book hat bell truck robot balloon scarf umbrella train car puzzle crown lamp key clock
mirror ring whistle flute guitar violin trumpet basket bucket bottle box blanket pillow button ribbon bracelet
necklace coat jacket shirt dress sweater boot shoe sock mitten glove cap bag backpack purse wallet coin stamp letter
card map compass telescope camera radio phone pencil crayon brush notebook diary painting picture vase cup mug plate
bowl spoon fork teapot kettle pot pan candle lantern torch flag tent rope ladder hammer shovel rake wagon sled
scooter skateboard marble puppet mask wand cape sword shield rocket canoe raft submarine tractor wheel spring magnet
shell stone pebble rock feather leaf flower seed acorn stick star moonstone gem pearl diamond chest egg snowman toy
teddy block top hoop net chair stool cushion music-box snow-globe paintbrush jump-rope
""")

ANIMALS = words("""
dog cat rabbit bird fox bear frog duck mouse turtle pony horse cow pig sheep goat hen chick goose swan owl crow
robin parrot penguin pigeon sparrow eagle squirrel hedgehog badger beaver otter mole deer moose wolf lion tiger
leopard elephant giraffe zebra monkey gorilla panda koala kangaroo camel donkey llama hippo rhino crocodile lizard
gecko snake snail worm bee butterfly ladybug ant cricket spider dragonfly caterpillar fish crab octopus whale
dolphin seal walrus shark starfish seahorse lobster puppy kitten lamb calf foal dragon unicorn dinosaur hamster
ferret raccoon skunk
""")

FOODS = words("""
cake pie pizza cookie sandwich cupcake muffin salad stew pudding tart omelet burger waffle pancake soup donut bun
pretzel milkshake smoothie jelly taco dumpling apple-pie fruit-salad birthday-cake honey-cake pumpkin-pie
""")

PLACES = words("""
park garden forest beach field river lake hill meadow farm market school village playground pond castle mountain
bridge harbor orchard valley barn library zoo museum station lighthouse waterfall island town mill bakery fountain
well
""")

FAMILY = ("mom", "dad", "grandma", "grandpa", "aunt", "uncle", "big sister", "big brother", "mother", "father")
WEATHER = ("sunny", "windy", "warm", "bright", "cloudy", "cold", "cool", "foggy", "quiet", "rainy")
HIDING = (
    "under the bed", "behind the big tree", "inside a box", "under a bench", "behind the door", "next to the pond",
    "between two rocks", "in the tall grass", "under a pile of leaves", "at the top of the stairs", "behind the sofa",
    "on a high shelf",
)  # fmt: skip


def with_article(phrase: str) -> str:
    """ "a kite", "an orange kite", "a unicorn": by the first letter, but for the words in "uni"."""
    vowel = phrase[0] in "aeiouAEIOU" and not phrase.startswith("uni")
    return f"{'an' if vowel else 'a'} {phrase}"
