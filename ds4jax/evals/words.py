"""Words that tasks are made of. Every eighth is kept for tests: no training conversation names it."""

from __future__ import annotations

from collections.abc import Sequence

HELD_OUT_EVERY = 8


def pool(words: Sequence[str], *, held_out: bool) -> list[str]:
    """Return the words that tests use, or the others."""
    return [word for i, word in enumerate(words) if (i % HELD_OUT_EVERY == 0) == held_out]


CITIES = tuple(
    "Lisbon Paris Berlin London Madrid Rome Oslo Tokyo Vienna Prague Dublin Athens Cairo Delhi Lima Boston Seattle Toronto Sydney "
    "Helsinki Warsaw Budapest Zurich Geneva Milan Naples Seville Porto Bergen Stockholm Copenhagen Hamburg Munich Cologne Brussels "
    "Antwerp Amsterdam Rotterdam Lyon Nice Marseille Bordeaux Glasgow Leeds Bristol Oxford York Chicago Denver Austin Dallas Miami "
    "Portland Phoenix Houston Atlanta Montreal Vancouver Ottawa Quito Bogota Santiago Havana Nairobi Accra Lagos Tunis Rabat Istanbul "
    "Ankara Beirut Amman Doha Dubai Mumbai Chennai Hanoi Bangkok Manila Jakarta Singapore Seoul Osaka Kyoto Beijing Shanghai Perth "
    "Melbourne Auckland Wellington Reykjavik Riga Vilnius Tallinn Krakow Zagreb Sofia Belgrade".split()
)
NAMES = tuple(
    "Clara Tom Anna Ben Lily Sam Mia Jack Emma Noah Ella Leo Lucy Max Nina Oscar Ruby Hugo Alice Felix Maya Peter Rosa Daniel Ivan Lena "
    "Olivia Adam Sara Paul Julia Mark Eva David Laura Simon Helen Martin Grace Victor Amy George Nora Henry Zoe Robert Ida Karl Vera Otto "
    "Jane Philip Kate Michael Sophie Thomas Rita Luke Carla Erik".split()
)
NOUNS = tuple(
    "lamp dog cat bird tree river house boat bread apple stone flower garden book letter window door horse rabbit fox bear fish moon star "
    "sun cloud rain snow wind hill mountain forest lake sea beach island bridge road train bike car plane ship kite ball drum bell clock "
    "key box basket bag coat hat shoe glove ring cup plate spoon table chair bed pillow blanket candle fire soup cake egg milk honey "
    "cheese butter salt sugar pear plum lemon cherry grape carrot potato bean corn leaf root seed grass sand shell feather nest mouse owl "
    "duck goose hen sheep goat cow pig frog turtle snail spider bee ant butterfly whale crab lion tiger monkey elephant castle tower "
    "village market school farm mill well field fence path gate wall roof ladder hammer nail rope wheel engine map coin jewel crown flag "
    "paper pencil brush paint picture mirror song story game puzzle dance doll robot rocket dragon king queen knight giant fairy wizard "
    "farmer baker doctor teacher sailor singer painter friend brother sister mother father baby child".split()
)
ADJECTIVES = tuple(
    "purple red blue green yellow white black brown pink golden silver small big tall short long old new young little tiny huge happy sad "
    "brave kind shy funny clever lazy quick slow warm cold soft hard loud quiet bright dark clean dusty sweet sour round flat strong weak "
    "gentle wild calm proud lonely lucky magic lost hidden secret strange friendly hungry sleepy busy careful".split()
)
VERBS = tuple(
    "whistle sing dance run jump swim read write paint cook build climb draw play share help learn listen smile sleep walk".split()
)
TOPICS = tuple(
    "the oldest bridge,the history of bread,how bees make honey,the best soup recipe,the nearest planet,how to grow tomatoes,the fastest "
    "train,famous painters,how rain is made,the largest whale,easy card games,how clocks work,the tallest mountain,cheap winter coats,how "
    "to knit a scarf,the price of silver,songs for children,how to train a dog,the rules of chess,books about dragons,how volcanoes "
    "work,museums for families,the deepest lake,how to bake a cake,the life of ants,how to fix a bike,the longest river,news about "
    "space,how to learn to swim,the meaning of colours,old castles,how to paint a wall,healthy breakfast ideas,the first computer,how "
    "candles are made,wild mushrooms,the speed of light,how to write a letter,birds of the forest,how to draw a horse".split(",")
)
SKIES = tuple("sunny cloudy rainy windy snowy foggy clear stormy".split())

# Sentence -> reply. Small talk is the first thing that people try.
SMALL_TALK = (
    ("Hello!", "Hello! How can I help you today?"),
    ("Hi", "Hi! What would you like to talk about?"),
    ("Good morning", "Good morning! I hope you have a nice day. What can I do for you?"),
    ("Good evening!", "Good evening! How can I help you?"),
    ("Hey there", "Hey! Nice to meet you. What is on your mind?"),
    ("How are you?", "I am fine, thank you. How are you?"),
    ("How are you today?", "I am very well, thank you for asking. How about you?"),
    ("Who are you?", "I am a very small language model. I write simple English, and I can call tools."),
    ("What are you?", "I am a small computer program that writes text. I am here to show how this server works."),
    ("What is your name?", "I have no real name. You can call me the small model."),
    ("What can you do?", "I can tell short stories, answer simple questions, remember words, and call tools such as the weather."),
    ("Can you help me?", "Yes, I will try. What do you need?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks a lot", "You are welcome. Is there anything else?"),
    ("That was nice.", "I am glad that you like it."),
    ("Goodbye", "Goodbye! Come back soon."),
    ("Bye!", "Bye! Have a good day."),
    ("Are you a human?", "No, I am not a human. I am a small language model."),
    ("Do you know everything?", "No. I am very small, and I often get facts wrong."),
    ("Are you smart?", "Not very. I am a tiny model, but I like to tell stories."),
    ("I am happy today.", "That is good to hear! What made you happy?"),
    ("I am sad.", "I am sorry to hear that. Would a short story help?"),
    ("I am bored.", "Let me tell you a story, or ask me a question!"),
    ("Good night", "Good night! Sleep well."),
    ("Nice to meet you.", "Nice to meet you too!"),
)
