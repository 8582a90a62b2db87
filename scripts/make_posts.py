"""Write examples/posts.jsonl: short posts like those of TL;DR, each with a reference summary.

The posts are synthetic. Each one describes a situation, with people, places, amounts of money and
days drawn at random. An unrelated sentence stands before it and another one after it. The posts
replace Reddit's dataset TL;DR, which cannot be shipped; no person wrote them. The last 48 posts are
the held-out set of examples/smollm2.yaml. Their situations are in no other post.

    python scripts/make_posts.py                    # writes examples/posts.jsonl
    python scripts/make_posts.py --out posts.jsonl
"""

import argparse
import json
import random
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "examples" / "posts.jsonl"
# Number of held-out situations, the last ones of `SITUATIONS`
HELD_OUT_SITUATIONS = 12
# Number of posts for each held-out situation, and for each other situation
HELD_OUT_POSTS = 4
TRAIN_POSTS = 8
QUESTION = "Sum up this post in one short sentence, in the first person."

HE = ("he", "him", "his")
SHE = ("she", "her", "her")
PEOPLE = {
    "kin": [("brother", HE), ("sister", SHE), ("cousin", SHE), ("uncle", HE), ("aunt", SHE)],
    "mate": [("flatmate", HE), ("flatmate", SHE), ("roommate", HE), ("roommate", SHE)],
    "work": [("manager", HE), ("manager", SHE), ("colleague", HE), ("colleague", SHE)],
    "friend": [("best friend", HE), ("best friend", SHE), ("old friend", HE), ("old friend", SHE)],
    "neighbour": [("neighbour", HE), ("neighbour", SHE), ("landlord", HE), ("landlady", SHE)],
    "partner": [("boyfriend", HE), ("girlfriend", SHE), ("husband", HE), ("wife", SHE)],
}
SLOTS = {
    "age": ["19", "22", "24", "27", "31", "36"],
    "city": ["Leeds", "Dublin", "Denver", "Toronto", "Perth", "Boston", "Glasgow", "Austin"],
    "far": ["Oslo", "Berlin", "Sydney", "Chicago", "Vienna", "Lisbon"],
    "feast": ["Easter", "Christmas", "New Year"],
    "when": ["last week", "last month", "two weeks ago", "on Sunday", "in March", "yesterday"],
    "n": ["three", "four", "five", "six"],
    "sum": ["$60", "$120", "$250", "$400", "$900"],
    "pet": ["dog", "cat", "rabbit", "parrot"],
    "food": ["bread", "cheese", "milk", "yoghurt", "cereal"],
    "hobby": ["guitar", "drums", "violin", "piano"],
    "trip": ["Spain", "Japan", "Mexico", "Iceland"],
    "car": ["car", "van", "motorbike"],
    "event": ["wedding", "graduation", "birthday", "anniversary"],
}
BEFORE = [
    "I am {age} and I live in {city}.",
    "This is a throwaway account.",
    "Sorry for any mistakes, I am on my phone.",
    "I never thought that I would write here.",
    "I moved to {city} when I was {age}.",
    "I have read here for years, and this is my first post.",
]
AFTER = [
    "What would you do?",
    "Am I wrong to be annoyed?",
    "Any advice is welcome.",
    "Thank you for reading this far.",
    "Please be honest with me.",
    "Has this happened to anyone else?",
]
SITUATIONS = [  # key of PEOPLE, title, story, reference summary
    (
        "mate",
        "Who eats my {food}?",
        "I share a kitchen with my {who}, and we buy our own food. My {food} has gone missing {n} "
        "times this month. {He} says that it must be a mistake.",
        "My {who} keeps eating my {food} and will not admit it.",
    ),
    (
        "mate",
        "The {hobby} at midnight",
        "My {who} bought a {hobby} {when} and practises after midnight. I get up at six for work. "
        "I asked {him} to stop {n} times, and {he} only laughed.",
        "My {who} plays the {hobby} at night and I cannot sleep.",
    ),
    (
        "mate",
        "Rent is late again",
        "My {who} and I pay the rent together. {He} has been late {n} months in a row, and I had "
        "to pay {sum} out of my savings so that we could keep the flat.",
        "My {who} is always late with the rent and I have to pay {sum} for {him}.",
    ),
    (
        "mate",
        "A guest who never leaves",
        "A friend of my {who} came to stay for a weekend {when}. The friend still sleeps on our "
        "sofa, pays nothing and uses all the hot water. My {who} sees no problem.",
        "A friend of my {who} came for a weekend and now lives on our sofa for free.",
    ),
    (
        "mate",
        "My laptop is not yours",
        "I came home early {when} and found my {who} at my desk, using my laptop without asking. I "
        "have bank details on it. It was not the first time.",
        "I caught my {who} using my laptop without asking me.",
    ),
    (
        "mate",
        "The {pet} nobody told me about",
        "My {who} brought home a {pet} {when} without telling me. I am allergic and sneeze all "
        "night. {He} says the {pet} is family now and will stay.",
        "My {who} got a {pet} without asking, and I am allergic to it.",
    ),
    (
        "kin",
        "A loan of {sum}",
        "I lent my {who} {sum} {when} to repair {his} {car}. {He} promised to pay me back in a "
        "month. Now {he} is going on holiday to {trip} and does not answer my calls.",
        "My {who} borrowed {sum} from me and goes on holiday instead of paying it back.",
    ),
    (
        "kin",
        "Not invited to the {event}",
        "Everybody in my family got an invitation to the {event} of my {who}, but I did not. We "
        "had an argument {when} about something small. My mother tells me to come anyway.",
        "My {who} did not invite me to {his} {event} after a small argument.",
    ),
    (
        "kin",
        "My {car} came back with a dent",
        "My {who} borrowed my {car} {when} to move house. It came back with a dent in the door. "
        "{He} says it was there before, but I have photos. The repair costs {sum}.",
        "My {who} dented my {car} and refuses to pay {sum} for the repair.",
    ),
    (
        "kin",
        "She wanted me to have it",
        "My grandmother left me her {hobby} when she died. My {who} took it from the house {when} "
        "and says that it should be {his}, although nobody else in the family plays.",
        "My {who} took the {hobby} that my grandmother left me.",
    ),
    (
        "kin",
        "Secrets at dinner",
        "I told my {who} {when} that I want to leave university. I asked {him} to keep it to "
        "{him}self. At dinner with {n} relatives {he} told everyone, and my father shouted at me.",
        "My {who} told the whole family my secret, that I want to leave university.",
    ),
    (
        "kin",
        "Free babysitter",
        "My {who} drops the children at my flat {n} evenings a week and comes back late. I work "
        "from home and fell behind {when}. When I said no, {he} called me selfish.",
        "My {who} uses me as a free babysitter and calls me selfish when I say no.",
    ),
    (
        "work",
        "My idea, {his} name",
        "I spent {n} weeks on a plan to save money at our office. My {who} showed it to the "
        "director {when} with only {his} own name on it, and got a bonus of {sum}.",
        "My {who} presented my work as {his} own and got a bonus for it.",
    ),
    (
        "work",
        "Messages on my day off",
        "My {who} writes to me on my days off and expects an answer at once. {When} I was at a "
        "{event} and got {n} messages. {He} was cold to me the next day.",
        "My {who} keeps sending me work messages on my days off.",
    ),
    (
        "work",
        "Paid less for the same job",
        "I trained my new {who} {when}. By accident I saw {his} contract: {he} earns {sum} more a "
        "month than I do, and I have been here for {n} years.",
        "I found out that my new {who} earns {sum} more than I do for the same job.",
    ),
    (
        "work",
        "Lunch thief",
        "Someone took my lunch from the office fridge {n} times. I put a note in the box {when}, "
        "and saw my {who} read it and throw it away. {He} smiled at me.",
        "My {who} steals my lunch from the office fridge.",
    ),
    (
        "work",
        "No holiday for me",
        "I asked for a week off {n} months ago to fly to {trip}. My {who} said yes, and I paid "
        "{sum} for the flight. {When} {he} told me that I have to work that week.",
        "My {who} cancelled my holiday after I had paid {sum} for the flight.",
    ),
    (
        "work",
        "Gossip in the office",
        "I told my {who} that I am looking for another job. {When} {n} people asked me about it, "
        "and the director wants to see me. Only one person could have told them.",
        "My {who} told the office that I am looking for a new job.",
    ),
    (
        "friend",
        "Always the driver",
        "I have a {car}, so I drive my {who} everywhere. {He} never pays for fuel. {When} I asked "
        "for {sum} for {n} months of driving, and {he} said that friends do not count.",
        "My {who} will not pay for fuel although I drive {him} everywhere.",
    ),
    (
        "friend",
        "{He} copied my whole {event}",
        "I planned my {event} for a year and showed everything to my {who}. {When} {he} had {his} "
        "own, with the same music, the same colours and the same food.",
        "My {who} copied everything that I had planned for my {event}.",
    ),
    (
        "friend",
        "Cancelled again",
        "My {who} and I plan to meet every week. {He} has cancelled {n} times, always an hour "
        "before. {When} {he} said {he} was ill, and then I saw photos of {him} at a party.",
        "My {who} cancels on me all the time and lied about being ill.",
    ),
    (
        "friend",
        "The trip to {trip}",
        "I booked a trip to {trip} with my {who} and paid {sum} for both of us. {When} {he} told "
        "me that {he} is going with someone else. The hotel gives no refund.",
        "My {who} left me alone with the trip to {trip} that I had paid for.",
    ),
    (
        "friend",
        "Stuck with the {pet}",
        "My {who} asked me to look after {his} {pet} for a weekend. That was {n} weeks ago. {He} "
        "does not come to fetch it, and I have spent {sum} on food and the vet.",
        "My {who} left {his} {pet} with me for a weekend and never came back for it.",
    ),
    (
        "friend",
        "A joke that hurt",
        "At my {event} my {who} gave a speech. {He} told {n} people how I failed my exams and "
        "cried for days. Everyone laughed. I have not spoken to {him} since.",
        "My {who} made fun of my failed exams in a speech at my {event}.",
    ),
    (
        "neighbour",
        "The parking war",
        "My {who} leaves {his} {car} in my parking space, though I pay for it. I left {n} notes on "
        "the window. {When} I had to park far away in the rain.",
        "My {who} keeps parking {his} {car} in my space.",
    ),
    (
        "neighbour",
        "My deposit is gone",
        "I moved out {when} and left the flat clean. My {who} keeps my deposit of {sum} because of "
        "{n} small marks on a wall, which were there when I moved in.",
        "My {who} will not give back my deposit of {sum} because of old marks on a wall.",
    ),
    (
        "neighbour",
        "No heating in winter",
        "Our heating broke {when} and it is freezing. My {who} has promised {n} times to send "
        "someone, and nobody came. I bought a heater for {sum} myself.",
        "Our heating is broken and my {who} does nothing about it.",
    ),
    (
        "neighbour",
        "The tree between us",
        "There was an old apple tree in my garden that I loved. When I was at work {when}, my "
        "{who} cut it down because it threw a shadow. {He} offered me {sum}.",
        "My {who} cut down my apple tree while I was at work.",
    ),
    (
        "neighbour",
        "A key {he} should not have",
        "I found my {who} in my kitchen {when}. {He} has a spare key and wanted to look at the "
        "pipes, but did not tell me. Things have been moved {n} times before.",
        "My {who} comes into my home without telling me.",
    ),
    (
        "neighbour",
        "Parcels disappear",
        "I ordered a present for {sum}, and the courier left it with my {who} {when}. {He} says "
        "that {he} never got it, but I saw the box in {his} rubbish.",
        "My {who} took my parcel worth {sum} and denies it.",
    ),
    (
        "partner",
        "Wedding without my family",
        "We want to get married in {trip}. My {who} wants a small party, and now says that my "
        "family should not come, though {his} own will. We have fought about it since {feast}.",
        "My {who} wants {his} family at our wedding but not mine.",
    ),
    (
        "partner",
        "The secret credit card",
        "I opened a letter {when} that I thought was mine. My {who} has a credit card that I did "
        "not know of, with a debt of {sum}. We are saving for a house.",
        "My {who} has a secret credit card with a debt of {sum}.",
    ),
    (
        "partner",
        "Every weekend at {his} mother's",
        "My {who} wants to spend every weekend at {his} mother's house, {n} hours away. I said "
        "{when} that I need a weekend at home. {He} packed and went alone.",
        "My {who} wants to visit {his} mother every weekend and I need time at home.",
    ),
    (
        "partner",
        "Games instead of me",
        "My {who} plays video games for {n} hours every evening. {When} it was our anniversary and "
        "I cooked. {He} ate at the computer and did not look up.",
        "My {who} plays video games all evening and ignored our anniversary.",
    ),
    (
        "partner",
        "A job in another city",
        "I was offered my dream job in {far} {when}. My {who} does not want to move, as {he} has "
        "{his} friends here. I have {n} days to decide.",
        "I got my dream job in {far}, but my {who} does not want to move.",
    ),
    (
        "partner",
        "{He} reads my phone",
        "I woke up {when} and saw my {who} with my phone in {his} hand. {He} knows my code and has "
        "read {n} months of messages. I have nothing to hide, but I am hurt.",
        "My {who} secretly read the messages on my phone.",
    ),
    # --- held out ---
    (
        "mate",
        "Nobody cleans but me",
        "My {who} and I made a plan for cleaning when we moved in. For {n} weeks I have done all "
        "of it. {When} I left the dishes, and now the kitchen smells.",
        "My {who} never cleans and leaves all the work to me.",
    ),
    (
        "mate",
        "My clothes at {his} party",
        "I saw photos of my {who} at a party {when}. {He} wore my new jacket, which cost {sum}. It "
        "was back in my wardrobe with a stain on it.",
        "My {who} wore my new jacket without asking and stained it.",
    ),
    (
        "kin",
        "Moving back in",
        "My {who} lost {his} job {when} and wants to live with me for {n} months. My flat has one "
        "room. My parents say that family must help.",
        "My {who} wants to move into my small flat after losing {his} job.",
    ),
    (
        "kin",
        "The wrong name",
        "I changed my name {n} years ago. My {who} still uses the old one, even at my {event} "
        "{when}. {He} says that {he} is too old to learn.",
        "My {who} refuses to use my new name.",
    ),
    (
        "work",
        "Asked to lie",
        "A customer complained about a broken {car} {when}. My {who} asked me to say that the "
        "customer broke it, though we both know that it was our fault.",
        "My {who} wants me to lie to a customer about a mistake that we made.",
    ),
    (
        "work",
        "The promotion",
        "My {who} promised me a promotion {n} months ago, and I worked every Saturday for it. "
        "{When} it went to a person who started this year.",
        "My {who} promised me a promotion and gave it to someone new.",
    ),
    (
        "friend",
        "{He} is dating my ex",
        "My {who} told me {when} that {he} has been seeing my ex for {n} months. I was with my ex "
        "for five years. Both of them want me to be happy for them.",
        "My {who} is secretly dating my ex.",
    ),
    (
        "friend",
        "Selling things I gave {him}",
        "I made a painting for the {event} of my {who}; it took me {n} weeks. {When} I saw it "
        "online, for sale at {sum}.",
        "My {who} is selling the painting that I made for {him}.",
    ),
    (
        "neighbour",
        "Smoke in my bedroom",
        "My {who} smokes on the balcony below my bedroom. I have to keep my window shut in the "
        "heat. I asked {him} {when} to go elsewhere, and {he} shut the door on me.",
        "Smoke from my {who} comes into my bedroom and {he} does not care.",
    ),
    (
        "neighbour",
        "Barking all day",
        "My {who} works all day and leaves {his} dogs alone. They bark for {n} hours, and I study "
        "at home for exams. {When} {he} told me to wear earplugs.",
        "The dogs of my {who} bark all day and I cannot study.",
    ),
    (
        "partner",
        "Forgotten birthday",
        "I planned a surprise for my {who} last year and spent {sum}. {When} it was my birthday, "
        "and {he} did not say a word until I cried in the evening.",
        "My {who} forgot my birthday although I did a lot for {him}.",
    ),
    (
        "partner",
        "{He} gave away my {pet}",
        "I was in hospital for {n} days. When I came home {when}, my {pet} was gone. My {who} had "
        "given it to a stranger, as it was too much work.",
        "My {who} gave away my {pet} while I was in hospital.",
    ),
]


def make_post(number: int, draw: random.Random) -> dict[str, str | int]:
    """Make a post about the situation ``number`` and return it as a row of the dataset.

    The row has the prompt (post and question), the post alone, its reference summary, and the
    number of the situation.
    """
    kind, title, story, summary = SITUATIONS[number]
    who, (he, him, his) = draw.choice(PEOPLE[kind])
    slots = {name: draw.choice(values) for name, values in SLOTS.items()}
    slots |= {"who": who, "he": he, "him": him, "his": his}
    slots |= {"He": he.capitalize(), "When": slots["when"][0].upper() + slots["when"][1:]}
    post = f"{title}\n\n{draw.choice(BEFORE)} {story} {draw.choice(AFTER)}".format(**slots)
    return {
        "prompt": f"{post}\n\n{QUESTION}",
        "post": post,
        "reference": summary.format(**slots),
        "situation": number,
    }


def make_posts(seed: int = 0) -> list[dict[str, str | int]]:
    """Return all posts, without duplicates.

    The posts for training come first, then the held-out posts. Each part is in random order.
    """
    draw = random.Random(seed)
    numbers = range(len(SITUATIONS))
    rows = []
    train = numbers[:-HELD_OUT_SITUATIONS]
    held_out = numbers[-HELD_OUT_SITUATIONS:]
    for part, each in ((train, TRAIN_POSTS), (held_out, HELD_OUT_POSTS)):
        posts: dict[str | int, dict[str, str | int]] = {}
        for number in part:
            goal = len(posts) + each
            while len(posts) < goal:
                post = make_post(number, draw)
                posts[post["prompt"]] = post
        shuffled = list(posts.values())
        draw.shuffle(shuffled)
        rows += shuffled
    return rows


def main(argv: list[str] | None = None) -> int:
    """Write the file with all posts and return the exit status."""
    parser = argparse.ArgumentParser(description="Write posts with reference summaries.")
    parser.add_argument("--out", type=Path, default=OUT, help="output file; default: %(default)s")
    path = parser.parse_args(argv).out
    rows = make_posts()
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} posts in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
