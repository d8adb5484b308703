"""Endless little stories from a seeded grammar: the text that the built-in model learns from.

A story is one expansion of the rule `story`. `{rule}` expands to one of the rule's alternatives, chosen anew
each time; `{slot}` is chosen once per story (the hero stays the hero); a capital first letter in the braces
capitalises what comes out. Nothing here is quoted from anywhere.

    python -m tools.tiny_stories 3        prints three stories
"""

from __future__ import annotations

import random
import re
import sys

GIRLS = ("Ada", "Mia", "Nora", "Lena", "Ruth", "Clara", "Ines", "Vera", "Rosa", "Tess")
BOYS = ("Tom", "Ben", "Otto", "Emil", "Jack", "Sam", "Hugo", "Felix", "Paul", "Theo")

SLOTS: dict[str, tuple[str, ...]] = {
    "town": ("Alder Bridge", "Stonefield", "Green Harbour", "Fox Hollow", "Windmill Hill", "Marsh End"),
    "place": ("old mill", "market", "forest", "harbour", "garden", "library", "station", "lighthouse", "bakery"),
    "shelter": ("barn", "tower", "kitchen", "workshop", "boat house", "stable"),
    "thing": ("key", "lantern", "compass", "kite", "drum", "blue scarf", "silver spoon", "map", "whistle", "ring"),
    "gift": ("basket of apples", "loaf of bread", "pot of honey", "jar of jam", "bag of nuts", "warm coat"),
    "animal": ("cat", "dog", "goat", "fox", "owl", "donkey", "rabbit", "crow", "hedgehog", "duck"),
    "trait": ("brave", "curious", "patient", "shy", "clever", "kind", "careful", "cheerful", "stubborn", "quiet"),
    "weather": ("rain", "snow", "wind", "fog", "storm", "sunshine"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "season": ("spring", "summer", "autumn", "winter"),
    "trade": ("baker", "miller", "fisherman", "clockmaker", "gardener", "teacher", "painter", "sailor", "postman"),
    "number": ("two", "three", "four", "five", "six", "seven"),
    "load": ("sack", "letter", "bucket", "barrel", "parcel", "message"),
    "dish": ("soup", "pie", "porridge", "cake", "stew", "pancakes"),
}

WEATHER = {
    "rain": ("The rain had been falling all night.", "Rain ran down the windows.", "It rained without a break."),
    "snow": ("Snow lay on every roof.", "The snow was deep and soft.", "It had snowed since the evening before."),
    "wind": ("A strong wind shook the trees.", "The wind sang in the chimneys.", "The wind blew the hats away."),
    "fog": ("Fog covered the fields like a blanket.", "The fog was so thick that nobody saw the church."),
    "storm": ("A storm was coming from the sea.", "Thunder rolled over the hills.", "The storm broke at noon."),
    "sunshine": ("The sun was shining.", "The sky was clear and blue.", "It was the warmest day of the year."),
}

RULES: dict[str, tuple[str, ...]] = {
    "story": (
        "{opening} {sky}\n{lost} {search} {found}\n{ending}",
        "{opening} {sky}\n{meet} {animal_talk} {animal_help}\n{ending}",
        "{opening}\n{pipeline} {trouble} {replace}\n{pipeline_end}",
        "{opening} {sky}\n{cooking} {sharing}\n{ending}",
        "{opening} {sky}\n{journey} {on_the_way} {arrival}\n{ending}",
        "{opening}\n{repair} {repair_work} {repair_end}\n{ending}",
        "{pipeline_opening}\n{pipeline} {trouble} {replace}\n{pipeline_end}",
        "{opening} {sky}\n{riddle}\n{ending}",
    ),
    "opening": (
        "Once upon a time there was a {trait} {child} named {hero} who lived in {town}.",
        "Once upon a time, in {town}, there lived a {trait} {trade} called {hero}.",
        "One {cold} morning in {season}, {hero} walked to the {place}.",
        "One {cold} morning, {hero} woke up early and looked out of the window.",
        "On {day} {hero} and {friend} met at the {place}.",
        "Long ago, a {trade} named {hero} lived near the {place} of {town}.",
        "In the town of {town} everybody knew {hero}, the {trait} {trade}.",
        "It was {day}, and {hero} had nothing to do.",
        "There was once a {trait} {child} named {hero}, and {his} best friend was a {animal}.",
        "{hero} was a {trait} {child} from {town}.",
        "Every {day} {hero} went to the {place} with {friend}.",
        "At the end of {season}, {hero} came home to {town}.",
    ),
    "cold": ("cold", "bright", "grey", "quiet", "windy", "fine", "foggy"),
    "sky": ("{sky_now}", "{sky_now}", "{sky_now} {mood}", "{mood}"),
    "mood": (
        "{He} felt {happy}.",
        "{hero} was {happy} and a little {tired}.",
        "The people of {town} were {happy} that day.",
        "{friend} sang a {small} song.",
        "Somewhere a bell rang {count} times.",
    ),
    "count": ("{number}",),
    "happy": ("happy", "glad", "hopeful", "restless", "full of plans", "in a good mood"),
    "tired": ("tired", "hungry", "cold", "nervous", "proud"),
    "weary": ("tired", "hungry", "cold", "thirsty"),
    "small": ("small", "short", "merry", "slow", "soft", "strange", "new"),
    "lost": (
        "Then {hero} saw that {his} {thing} was gone.",
        "But the {thing} was not in its place.",
        '"Where is my {thing}?" asked {hero}.',
        "That day {he} lost the {thing} that {his} {elder} had given {him}.",
        '"Somebody has taken my {thing}!" cried {hero}.',
    ),
    "elder": ("mother", "father", "grandmother", "grandfather", "uncle", "aunt", "teacher"),
    "search": (
        "{He} looked under the {furniture}, behind the {furniture} and even in the {shelter}. {nothing}",
        "{friend} helped {him} to look for it. {nothing} {ask_animal}",
        "{He} asked the {other_trade}, but the {other_trade} only shook his head. {ask_animal}",
        '"Did you look in the {shelter}?" said {friend}. "Not yet," said {hero}.',
        "They searched the whole {place} until {evening}. {nothing}",
    ),
    "nothing": (
        "There was nothing but dust.",
        "It was not there.",
        "They found an old shoe, but no {thing}.",
        "All they found was a {coin}.",
    ),
    "coin": ("coin", "feather", "button", "stone", "nail", "leaf"),
    "furniture": ("table", "bed", "stove", "cupboard", "door", "chair", "bench", "stairs"),
    "evening": ("evening", "noon", "nightfall", "supper", "sunset"),
    "other_trade": ("{trade}",),
    "ask_animal": (
        "Even the {animal} did not know.",
        "The {animal} watched them and said nothing.",
        "Only the {animal} looked up.",
    ),
    "found": (
        "At last the {animal} pulled at {his} sleeve and led {him} to the {shelter}. There lay the {thing}.",
        "In the end {friend} found the {thing} in the {shelter}, under {a_number} {sacks}.",
        "Then {hero} put {his} hand into {his} own pocket. There was the {thing}!",
        'Late in the day the {trade} came by. "Is this your {thing}?" he asked. It was.',
    ),
    "a_number": ("{number}",),
    "sacks": ("sacks", "blankets", "boxes", "books", "baskets"),
    "meet": (
        "On the way to the {place} {he} met a {animal} with a {sore} {leg}.",
        "Behind the {shelter} sat a {animal} that could not find its way home.",
        "A {animal} was waiting at the door of the {shelter}.",
        "Suddenly a {animal} stepped out of the {place}.",
    ),
    "sore": ("sore", "broken", "stiff", "wet"),
    "leg": ("leg", "wing", "foot", "ear"),
    "animal_talk": (
        '"Good morning," said the {animal}. "I have not eaten for {number} days."',
        '"Can you help me?" asked the {animal}. "Of course," said {hero}.',
        '"Why are you so sad?" asked {hero}. "Because I am alone," said the {animal}.',
        '"Please do not be afraid," said {hero}. The {animal} came closer, step by step.',
    ),
    "animal_help": (
        "So {hero} gave the {animal} {some_food} and a place by the fire. {thanks}",
        "{He} carried the {animal} all the way to the {shelter}. {thanks}",
        "{hero} and {friend} built a {small_house} for the {animal}. {thanks}",
        "They shared {some_food}, and the {animal} told them about the {place}. {thanks}",
    ),
    "some_food": ("a piece of bread", "some milk", "half of {his} apple", "a bowl of {dish}", "the last cheese"),
    "small_house": ("little house", "warm bed", "nest of straw", "small roof"),
    "thanks": (
        '"Thank you," said the {animal}. "I will not forget it."',
        "From then on the {animal} followed {him} everywhere.",
        "The next morning the {animal} brought {him} a {coin}.",
        "After {number} days the {animal} was well again.",
    ),
    "pipeline_opening": (
        "The pipeline of {town} had {number} stages.",
        "A pipeline is only as fast as its slowest stage, said the {trade} of {town}.",
        "In {town} the people had built a long pipeline from the {place} to the {shelter}.",
        "The pipeline never slept, and {hero} worked at its first stage.",
    ),
    "pipeline": (
        "{hero} stood at the first stage and {friend} at the last. {Each_load}",
        "At the first stage {hero} filled a {load}, and at the last stage {friend} counted it. {Each_load}",
        "From morning to night one {load} after another went down the line. {Each_load}",
        "The work was done in stages: {hero} took a {load}, did {his} part and gave it to {friend}. {Each_load}",
    ),
    "each_load": (
        "While one {load} was at the last stage, the next {load} was already on its way.",
        "No stage had to wait, and nobody was idle.",
        "Every {load} arrived in the right order.",
        "As soon as a {load} was gone, the next one came.",
    ),
    "trouble": (
        "One day the {second} stage stopped. {stop_talk}",
        "Then, at noon, the {second} stage broke down. {stop_talk}",
        "But {friend} fell asleep, and the whole line stood still. {stop_talk}",
        "In the middle of the work a bubble came down the pipe, and everybody waited. {stop_talk}",
    ),
    "second": ("first", "second", "third", "last"),
    "stop_talk": (
        '"What shall we do?" asked {friend}.',
        '"Do not worry," said {hero}. "I have written everything down."',
        '"Nothing is lost," said {hero}. "We know what we have sent."',
        '"Who is idle?" called {hero}. Nobody answered.',
    ),
    "replace": (
        "So they put a new stage in its place and sent every {load} again. {resume}",
        "{hero} ran to the {shelter}, fetched a new wheel and mended the stage. {resume}",
        "The {trade} took the empty place, and {hero} repeated what was missing. {resume}",
        "They counted to {number}, opened the gate, and the line began to move. {resume}",
    ),
    "resume": (
        "The stream went on as if nothing had happened.",
        "Not a single {load} was missing.",
        "At the other end nobody noticed anything.",
        "Every {load} came out exactly as before.",
    ),
    "pipeline_end": (
        "In the evening they counted: {number} hundred {loads}, and none was lost.",
        'From that day on the people of {town} said: "Keep every stage busy."',
        '"A good line forgives a broken stage," said {hero}, and went home.',
        "And the pipeline of {town} is running to this day.",
        "{hero} and {friend} were tired, but they were proud of their pipeline.",
    ),
    "loads": ("{load}s",),
    "cooking": (
        '{hero} wanted to make {dish} for {friend}. "We need flour, {butter} and salt," {he} said.',
        "There was to be a feast in {town}, and {hero} had promised to bring {dish}.",
        'In the {shelter} it smelled of {dish}. "Who is cooking?" asked {friend}. It was {hero}.',
        "{He} put {number} {onions} into the pot and stirred slowly.",
    ),
    "butter": ("butter", "milk", "honey", "sugar", "eggs", "apples"),
    "onions": ("onions", "carrots", "apples", "eggs", "potatoes", "spoons of honey"),
    "sharing": (
        'The first spoon was too hot, the second was just right. "More salt," said {friend}.',
        "But the {animal} jumped on the table and ate half of it. {hero} had to laugh.",
        "When the {dish} was ready, {he} called all the neighbours, and {number} of them came.",
        'They ate until the pot was empty. "That was the best {dish} of my life," said {friend}.',
    ),
    "journey": (
        "{hero} had to bring a {gift} to {his} {elder} on the other side of the {hills}.",
        "{hero} and {friend} took the {train} to {other_town}.",
        'A letter had come. "Come quickly," it said, "and bring the {thing}."',
        '"I want to see the sea," said {hero}, and {he} packed a {gift} and {his} {thing}.',
    ),
    "hills": ("hills", "river", "lake", "forest", "mountains", "valley"),
    "train": ("train", "boat", "bus", "ferry", "cart"),
    "other_town": ("the sea", "the city", "the next village", "the island", "the mountains"),
    "on_the_way": (
        "At the bridge {he} met a {trade} who had lost his way. {road_talk}",
        "Half way there the {train} stopped, and everybody had to walk. {road_talk}",
        "The road was long, and soon {he} was {weary}. {road_talk}",
        "{friend} knew a shorter way through the {hills}. {road_talk}",
    ),
    "road_talk": (
        '"How far is it?" asked {hero}. "{Number} miles," was the answer.',
        '"Let us rest for a while," said {friend}.',
        "They sat down and shared an apple.",
        "A {animal} showed {him} the way.",
    ),
    "arrival": (
        "They arrived when the first stars were in the sky.",
        "At last {he} saw the lights of the houses.",
        "At the gate stood {his} {elder} and waved with both hands.",
        "When {he} came there, the door was open and the fire was warm.",
    ),
    "repair": (
        "The clock of the {shelter} had stopped, and nobody knew the time.",
        "The roof of the {shelter} was broken, and {winter} was near.",
        "The wheel of the old mill did not turn any more.",
        "The bridge over the river had lost {number} boards in the storm.",
    ),
    "winter": ("winter", "the rain", "the cold", "the storm"),
    "repair_work": (
        '"I can mend it," said {hero}. {friend} brought {a_tool} and held the {ladder}.',
        "{hero} took {a_tool} and worked for {number} hours.",
        'The {trade} laughed. "A {child} cannot do that." But {hero} took {a_tool} and began.',
        "First {he} tried {a_tool}, then {butter} and even {dish}. Nothing helped. Then {friend} had an idea.",
    ),
    "a_tool": ("a hammer", "a saw", "a long rope", "a pot of glue", "an old wheel", "a box of nails"),
    "ladder": ("ladder", "lamp", "rope", "board"),
    "repair_end": (
        "By {evening} the work was done.",
        'Then, slowly, it moved. "It works!" cried {friend}.',
        "All the people clapped their hands.",
        "It was not pretty, but it was strong.",
    ),
    "riddle": (
        '"I know a riddle," said {friend}. "What has {teeth} but cannot bite?" {think} "{A_comb}," said {hero}.',
        '"What goes up when the rain comes down?" asked {friend}. {think} "An umbrella," said {hero}.',
        '"What runs but has no legs?" asked {friend}. {think} "A river," said {hero}.',
        '"What has hands but cannot clap?" asked the {trade}. {think} "A clock," said {hero}.',
        '"What gets wetter the more it dries?" asked {friend}. {think} "A towel," said {hero}.',
    ),
    "teeth": ("teeth",),
    "a_comb": ("a comb", "a saw"),
    "think": (
        "{hero} thought about it for a while.",
        "{hero} looked at the sky and thought.",
        'The {animal} yawned. "Wait, wait," said {hero}.',
        "It was quiet for a moment.",
    ),
    "ending": (
        "And so they all went home and slept well.",
        "{hero} never forgot that {day}.",
        '"Tomorrow we will come back," said {friend}, and {hero} nodded.',
        "That night {he} dreamed of the {place}.",
        "{He} smiled, put the {kettle} on the fire and told {his} {elder} everything.",
        "And if you come to {town}, you can still see it.",
        "After that {hero} was never {sad} again.",
        '"What a day!" said {friend}. "What a day!" said {hero}.',
    ),
    "kettle": ("kettle", "pot", "soup", "milk"),
    "sad": ("sad", "afraid", "late", "alone", "bored"),
}

_BRACES = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])(?= [aeiouAEIOU])")


def story(rng: random.Random) -> str:
    """One story, about 60 to 130 words, without trailing newline."""
    girls_first = rng.random() < 0.5
    hero = rng.choice(GIRLS if girls_first else BOYS)
    friend = rng.choice([name for name in (*GIRLS, *BOYS) if name != hero])
    slots = {name: rng.choice(values) for name, values in SLOTS.items()} | {"hero": hero, "friend": friend}
    pronouns = ("she", "her", "her", "girl") if girls_first else ("he", "him", "his", "boy")
    slots |= dict(zip(("he", "him", "his", "child"), pronouns, strict=True))
    slots["sky_now"] = rng.choice(WEATHER[slots["weather"]])

    def expand(match: re.Match[str]) -> str:
        name = match[1]
        key = name[0].lower() + name[1:]
        text = slots[key] if key in slots else _BRACES.sub(expand, rng.choice(RULES[key]))
        return text if key == name else text[0].upper() + text[1:]

    return _ARTICLE.sub(r"\1n", _BRACES.sub(expand, "{story}"))


if __name__ == "__main__":
    source = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        print(story(source), end="\n\n")
