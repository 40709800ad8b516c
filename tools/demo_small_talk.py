"""Small talk for the demo model, made by rule: what strangers type first, and the few answers.

A pattern has choices, `(a|b|)`, and slots, `<thing>`. Names in slots are on the training side of
the split in demo_facts.py. The lines that judge the model are in eval_demo.py, and none of them is
made here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from demo_facts import CITIES, FOODS, JOBS, PETS, name_for

TOY = "I am a toy of 2.8 million parameters: I can't answer that, but I remember what you tell me."
"""The answer to all that the model can't know or do."""

_SLOTS: Mapping[str, str] = {
    "thing": (
        "computer|phone|house|car|bicycle|engine|bridge|planet|star|galaxy|moon|atom|cell|virus|"
        "language|poem|song|story|novel|email|letter|essay|recipe|list|table|program|function|"
        "script|class|loop|database|server|network|website|file|folder|picture|film|game|match|"
        "team|school|teacher|student|lesson|exam|law|tax|bank|loan|price|market|company|job|boss|"
        "meeting|plan|project|budget|contract|holiday|trip|flight|hotel|ticket|map|mountain|river|"
        "lake|ocean|island|forest|desert|volcano|earthquake|storm|cloud|rainbow|tree|flower|seed|"
        "garden|farm|cow|horse|whale|shark|eagle|bee|ant|spider|dinosaur|king|queen|president|war|"
        "peace|history|science|physics|chemistry|biology|math|algebra|number|prime number|circle|"
        "triangle|equation|theorem|music|guitar|piano|dance|painting|museum|theatre|kitchen|oven|"
        "knife|coffee|tea|milk|sugar|salt|wine|beer|doctor|hospital|medicine|heart|brain|blood|"
        "sleep|dream|fear|love|money|time|space|energy|light|sound|heat|gravity|electricity|"
        "battery|robot|artificial intelligence|machine learning|neural network|cache|memory|"
        "transformer|quantum computer|black hole|stock market|bitcoin|religion|philosophy|god"
    ),
    "topic": (
        "cats and dogs|the sea|the old castle|life on Mars|the French revolution|the Roman empire|"
        "photosynthesis|evolution|climate change|relativity|the second world war|sorting numbers|"
        "binary search|prime numbers|regular expressions|the Eiffel tower|the Great Wall|"
        "a dragon|a lonely robot|a brave knight|my grandmother|summer|winter|spring|autumn|"
        "the weekend|healthy food|good manners|a job interview|a birthday party|learning guitar|"
        "losing weight|saving money|growing tomatoes|the human body|the solar system|democracy|"
        "inflation|the internet|open source|a small town|the night sky|an honest thief"
    ),
    "person": (
        "Einstein|Newton|Mozart|Shakespeare|Napoleon|Cleopatra|Caesar|Gandhi|Darwin|Picasso|"
        "Beethoven|Galileo|Plato|Turing|Lincoln|Columbus|Marie Curie|Leonardo"
    ),
    "land": (
        "France|Spain|Italy|Germany|Japan|China|India|Brazil|Canada|Mexico|Egypt|Kenya|Norway|"
        "Sweden|Poland|Peru|Chile|Turkey|Greece|Australia|Vietnam|Portugal|Ireland|Cuba"
    ),
    "tongue": "French|Spanish|German|Italian|Japanese|Chinese|Latin|Russian|Arabic|Portuguese",
    "code": "Python|Java|Rust|C|Go|Swift|SQL|HTML|bash|JavaScript",
    "adj": (
        "big|small|old|new|fast|slow|red|blue|green|hot|cold|heavy|expensive|cheap|dangerous|"
        "important|famous|popular|difficult|easy|strong|deep|high|long|far|round|sweet|loud"
    ),
    "verb": (
        "fly|swim|drive|cook|dance|sing|read|write|draw|paint|code|count|dream|sleep|think|learn|"
        "speak|see|hear|feel|eat|drink|play chess|play football|tell jokes|browse the internet|"
        "open files|send emails|make coffee|solve equations|understand me|translate|reason"
    ),
    "did": (
        "bought a|lost my|found a|broke my|sold my|fixed the|cleaned the|painted the|missed the|"
        "forgot my|saw a|dropped the|won the|burned the|borrowed a|dreamed of a"
    ),
    "event": (
        "The train was late|My neighbours are loud|The meeting was long|Dinner was good|"
        "The dog barks all night|We went to the beach|My team won the match|It was a long day|"
        "The kids are at school|Work was hard|The coffee is cold|Traffic was terrible|"
        "My computer is slow|The party was fun|The garden looks nice|My back hurts|"
        "The bus did not come|We are moving next month|Prices went up again|I slept well|"
        "I finished my homework|Today is my birthday|My sister called me|I passed the exam|"
        "The film was boring|I am learning to cook|I am on holiday|I have a meeting soon"
    ),
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "pet": "|".join(PETS),
    "food": "|".join(FOODS),
    "job": "|".join(JOBS),
    "city": "|".join(CITIES),
}

_KINDS: tuple[tuple[float, str, tuple[str, ...]], ...] = (
    (
        3.0,
        "Hello! How can I help you?",
        (
            "(Hello|Hi|Hey|Hiya|Howdy|Yo|Hey hey|Hi hi|Hello hello|Heya|Hullo)"
            "(| there| you| friend| my friend| bot| robot| computer| assistant| buddy| everyone|"
            " again| world| dear| mate| model| AI| demo)",
            "(Greetings|Salutations|Welcome|Aloha|Hola|Bonjour|Hallo|Ciao|Salut|Servus|Moin|Hej|"
            "Ahoy|Namaste|Guten Tag|Buenos dias|Good day|Good afternoon|Sup|Wassup|G'day)"
            "(|| friend| to you| there| bot)",
            "(Hello|Hi|Hey), (anybody|anyone|is anyone|is somebody) (there|here|home)",
            "<hi>(,|) (little|dear|sweet|old|tiny|funny|clever|big) (thing|bot|box|toy|pal|"
            "fellow|<pet>)",
            "<hi> (pal|folks|team|sir|madam|captain|neighbour|stranger|dude|man|all|both|<pet>)",
            "<hi> from (<city>|<land>|here|me|my (desk|house|kitchen|phone|office)|the <thing>)",
            "<hi>, (I just installed this|I am trying this|my first try|I am a beginner|"
            "look at me)",
            "(Greetings|Salutations|Welcome)(,|) (from <land>|bot|robot|computer|earthling|"
            "toy|pal)",
            "(Morning|Evening|Afternoon|Good afternoon|Good evening|Good day)( all|"
            " everyone| bot| from <city>|)",
            "<hi> <hi>(| <hi>)",
            "(Nice|Good|Pleased|Great|Happy) to (meet|see) you(| too)",
            "(Can|Could) (I|we) (talk|chat|speak)( to you|)",
            "(Anybody|Anyone|Somebody) (there|here|home)",
            "Are you (there|here|awake|ready|online|on|listening|alive)",
            "I (want to|would like to|just want to) (say hello|say hi|chat|talk)( to you|)",
            "<hi>, (it is me|nice to be here|glad to be here|good to see you|let us start)",
        ),
    ),
    (
        1.5,
        "I am fine, thank you.",
        (
            "(<hi>, |<hi> |)(How are|How're|how r) (you|u)( doing|)( today| now| this morning|"
            " tonight| my friend|)",
            "How (is|was) (your day|life|your morning|your evening|your week|everything)( so far|)",
            "How (do you feel|are you feeling|are things|have you been|goes it)( today|)",
            "(What is|What's|Whats) (up|new|going on)( with you| today| there|)",
            "(Are you|You) (ok|okay|well|fine|good|all right)( today|)",
            "How are you (feeling|coping|getting on|keeping|today|these days)( today| now|)",
            "(Everything|All) (ok|okay|good|fine|well)( with you|)",
            "How is it going( today| there| over there|)",
        ),
    ),
    (
        1.5,
        "You are welcome.",
        (
            "(Thanks|Thank you|Thx|Ty|Many thanks|Thank u|Cheers|Much appreciated)"
            "(| a lot| so much| very much| again| my friend| for that| for the help|"
            " for your answer| for listening| for helping me| for everything| bot| anyway)",
            "I (thank you|am grateful|appreciate it|appreciate that|appreciate your help)",
            "(That was|That is|You were|You are) (helpful|very helpful|so helpful|a great help), "
            "(thanks|thank you)",
            "(Thx|Ty|Thanks|Thank you) (man|pal|bro|dude|a bunch|a ton|bunches|toy|buddy|sir|all)",
            "(Great|Good|Perfect|Nice|Okay|Wonderful), (thanks|thank you)(| a lot| very much)",
        ),
    ),
    (
        1.5,
        "Goodbye! Come back soon.",
        (
            "(Bye|Goodbye|Bye bye|Good bye|Farewell|Cya|Adios|Ciao ciao|Au revoir)"
            "(| for now| then| my friend| now| bot| everyone| and thanks)",
            "(Ok|Okay|Well|So|Right|And|Now)(,|) (bye|goodbye|bye bye|farewell|so long)"
            "( then| bot|)",
            "(It is|It's|Is it|) time to (leave|go|stop|sleep|say goodbye)( now| for me|)",
            "(Talk|Speak|Chat) (soon|later|tomorrow|again)( bot| then|)",
            "See (you|ya) (on <day>|in <city>|in a (week|month|year|minute)|after lunch|at <num>)",
            "(Talk|Chat|Speak)( again|) (later|again|tomorrow|on <day>|next time)",
            "(That|This) (was|is|will be) (all|enough|it)( for (now|today|me|tonight)|)"
            "(, bye|, goodbye|, see you|)",
            "(Have|Enjoy) (a|the|your) (nice|good|lovely|pleasant|fine|<adj>) (day|evening|"
            "week|<day>|"
            "trip|afternoon|rest of the day|holiday)( now| too|)",
            "See (you|ya)( later| soon| tomorrow| again| around| next time|)",
            "(Talk|Speak) to you (later|soon|tomorrow)",
            "I (have to|must|need to|should|gotta) (go|leave|run|stop)( now| soon| home| to bed|)",
            "(Take care|So long|Until tomorrow|Until next time|Have a nice day|Have a good one|"
            "Have a good evening|Catch you later|I am leaving|I am done|That is all|The end|"
            "I am off|Over and out|exit|quit|stop|end)( now| for today|)",
        ),
    ),
    (
        0.6,
        "Have a good evening.",
        (
            "(Good night|Night night|Sleep tight|Sweet dreams|Nighty night|Rest well|Sleep well)"
            "(| everyone| now| dear| bot| and sleep tight| and sweet dreams| my friend| toy)",
            "(It is|It's) (late|time for bed|night here|dark outside)(, good night| now|)",
        ),
    ),
    (
        1.2,
        "I am a very small demo model.",
        (
            "(Who|What) (are|r) (you|u)( really| exactly|)",
            "What is your (name|job|model|version|purpose|type)",
            "(What's|Whats) your name",
            "(Are you|Is this) (a|an) (robot|bot|human|person|machine|model|program|real person|"
            "language model|computer|AI|llm|toy|woman|man|chatbot)",
            "(Do you have|Have you got) a name",
            "(Tell me about|Introduce|Describe) yourself( please|)",
            "(Who|What company) (made|built|trained|created|wrote|invented) you",
            "(What|Which) (model|kind of model|sort of bot|AI) (are you|is this|do I talk to)",
            "How (big|large|old|small) are you",
            "Are you (ChatGPT|Claude|Gemini|Llama|Siri|Alexa|GPT|real|conscious|human|"
            "alive or not)",
            "Where (are you from|do you live|do you come from|are you)",
        ),
    ),
    (
        1.0,
        "I can remember what you tell me.",
        (
            "What (can|could) (you|u) do( for me| here|)",
            "(How|What) (can|could) you (help|help me with|help with|assist)( me|)",
            "(Can|Could|Will|Would) you help me( please| out| now|)",
            "(I need|I want|Give me|Please give me) (help|some help|your help)",
            "(Help|Help me|Help please|Please help|Please help me)",
            "What (are you good at|is this|do you do|are your skills|are your abilities|else)",
            "(How|What) (do I|should I|must I) (use|do with|ask|type)( this| you| here|)",
            "What (may|can|should) I (ask|say|type|tell you)( you| here|)",
            "(Can|Do|Will) you remember( things| what I say| me| anything| something|)",
            "What (works|happens) here",
            "(What|So what|And what) are you (supposed|meant|made|built|there|trained) (to do|for)",
            "(What|Which) (things|stuff|tasks|tricks|jobs) (can|could) you (do|perform|handle)",
            "(What|So what) do you do (here|for people|for a living|for fun|the whole day|with me)",
            "(Can|Could|Would|Will) you (assist me|be useful|do something|support me|lend a hand)",
            "(Lend|Give) me a (tip|hint|clue|helping hand)( please|)",
            "(Show|Tell) me what (you do|you are good at|is possible|works|I can do here)",
            "(Help|Assist)( me|)(,|) (bot|robot|toy|computer|friend|I am lost|now)",
        ),
    ),
    (
        5.0,
        TOY,
        (
            "(What|Who) (is|was|are|were) (a|an|the|my|your) <thing>( in <land>| of <city>|)",
            "(What|Who) (is|was) (<topic>|<person>|<name>)",
            "(Explain|Describe|Define|Summarize)( to me|) (<topic>|the <thing>|a <thing>)"
            "( please|)",
            "(Write|Compose|Draft|Create|Make)( me|) a (<adj> |)(poem|story|letter|song|essay|"
            "email|joke|tweet|recipe|summary|report|speech|program|function|script|<thing>)"
            "( about <topic>| about <thing>| in <code>| in <tongue>| for <name>| for my <thing>|)"
            "( please|)",
            "(Write|Tell|Make|Create|Compose|Invent|Give|Sing)( me| us|) (a|an|one|some|the) (poem|"
            "story|song|essay|email|letter|haiku|speech|recipe|text|code|limerick|<adj> poem|"
            "<adj> story|bedtime story|rhyme|report|list|plan|summary)( please|)",
            "(Write|Show|Give|Send)( me|) (some|the|a bit of|a piece of) (code|text|<code>|<code> "
            "code)( for <topic>| that sorts a <thing>| for a <thing>|)",
            "(Translate|Say) (this|that|<thing>|hello|it) (to|into|in) <tongue>",
            "(What is|How much is|What's|Calculate|Compute|Solve|)( |)<num> (+|plus|*|times|-|minus"
            "|/|divided by|x) <num>( =|)",
            "(Why|When|Where|How) (is|was|are|were|does|did|do|can|should|will) (the|a|my|your|we|"
            "people|<name>|<person>) <thing>( <adj>| go| work| begin| stop| happen| exist|)",
            "Why (is|are) (the|a) <thing> <adj>",
            "(Who|What) (won|wrote|invented|discovered|painted|started|killed|sings|owns|built) "
            "(the|a|my) (<thing>|<topic>)",
            "(Which|What) <thing> (is|was) (the |)(<adj>|best|worst)(| in <land>| of all| today)",
            "(What is|Name|Tell me) the (capital|population|president|flag|currency|king|"
            "best city) of <land>",
            "How (<adj>|many|much) (is|are|was) (the |a |)<thing>(s|)( in <city>|)",
            "How (do|can|should) I (<verb>|make a <thing>|cook <food>|fix my <thing>|"
            "find a <thing>|"
            "become a <job>|learn <tongue>|write <code>|get to <city>|buy a <thing>)",
            "(Can|Could|Would|Will|Do) you (<verb>|know <person>|know <topic>|buy me a <thing>|"
            "find a <thing>|explain <topic>|translate <tongue>|write <code>|read my <thing>)"
            "( for me|)( please|)",
            "(Do you (know|like|have|want|believe in)|Have you (seen|heard of|read)) "
            "(<topic>|the <thing>|a <thing>|<person>|<food>)",
            "(Recommend|Suggest|Find|Choose|Buy|Order)( me|) (a|the best|some|a good) (<thing>|"
            "<food>|place in <city>|hotel in <city>|name for my <pet>)",
            "(What|Which) (day|date|time|year|month)( is it| is today| is it now|)",
            "What time is it( now| in <city>|)",
            "(What are|Give me|List|Tell me)( the|) (news|facts|rules|steps|news of today|"
            "headlines|three tips|five ideas|some ideas|pros and cons)( about <topic>|"
            " for <topic>|)",
            "(Tell me|Talk|I want to know|I have a question|Teach me)( something|) about (<topic>|"
            "<thing>|<person>|<land>)",
            "(Fix|Debug|Review|Correct|Improve|Translate|Rewrite|Check) (this|my|the) "
            "(<thing>|code|"
            "text|sentence|<code>)( please|)",
            "(Is|Are|Was) (the|a|my) <thing> (<adj>|real|true|good|bad|better than a <thing>)",
            "What does (<thing>|this|it|that|<person>) (mean|do|say|cost|eat)",
            "(Should|Could|May|Can) I (<verb>|buy a <thing>|eat <food>|sell my <thing>|trust you|"
            "visit <land>|ask about <topic>)",
            "(Play|Open|Start|Run|Search|Google|Turn on|Call|Set|Book|Show) (a|the|my|"
            "some) <thing>",
            "What (if|about) (<topic>|a <thing>|the <thing>)",
            "(What|How) about (<topic>|<thing>|<person>)",
            "(def|import|print|SELECT|function|class|git|sudo|curl) <thing>",
            "(Why|How|When|Where|What for|Which one|Who else|How come|What else)( exactly| then|)",
        ),
    ),
    (
        2.0,
        "I see. Tell me more.",
        (
            "<event>( today| yesterday| again|)",
            "I <did> <thing>( today| yesterday| last week|)",
            "(We|They|She|He|<name>) (saw|found|lost|bought|has|had|wants|likes) (a|the) <thing>",
            "(The|My|This|Our|Your) <thing> is (very |so |too |really |)<adj>",
            "I (think|believe|hope|know|guess) (so|not|it is <adj>|you are <adj>|that it works)",
            "I (like|love|hate|want|need|miss) (my|the|a) <thing>( a lot|)",
            "I am (at|in) (home|work|school|the <thing>|a <thing>)( now|)",
            "I am (going to|looking at|thinking about|worried about|writing) (a|the|my) <thing>",
            "(There is|Here is|This is|That is|It is|It was) (a|the|my) <thing>",
            "(It is|It was) (<adj>|late|early|Monday|Friday|over|done|broken)( here| today|)",
            "(Something|Nothing|A lot|So much) (happened|changed|went wrong)( today|)",
            "Let (me|us) (think|see|try|start|begin)( about it| again|)",
        ),
    ),
    (
        1.0,
        "I am happy you like it.",
        (
            "(Wow|Great|Super|Awesome|Amazing|Cool|Perfect|Excellent|Brilliant|Wonderful|Lovely|"
            "Fantastic|Nice|Well done|Good job|Bravo|Neat|Sweet|Impressive|Good)"
            "(| job| work| answer| bot| stuff| one| indeed| very much)",
            "(That|This|It) (is|was) (great|good|nice|cool|amazing|funny|perfect|impressive|fun)",
            "You are (great|good|nice|cool|amazing|funny|smart|clever|kind|sweet|the best|cute)",
            "I (like|love) (you|this|it|that|your answer|talking to you|your style)",
            "(Haha|Hahaha|Lol|Hehe|Ha ha|Rofl|:-\\)|:\\)|<3)( that is funny| good one|)",
        ),
    ),
    (
        1.0,
        "I am sorry. I am only a toy.",
        (
            "(That|This|It) (is|was) (wrong|bad|stupid|not true|nonsense|boring|false|terrible|"
            "not right|not what I asked|incorrect|useless)",
            "You are (wrong|bad|stupid|dumb|boring|useless|slow|annoying|silly|crazy|not helpful|"
            "lying|weird|an idiot|strange|broken)",
            "I (hate|dislike|do not like|don't like) (you|this|it|that|your answer)",
            "(You|This) (did not|didn't|does not|doesn't|do not|don't) (answer|help|work|"
            "understand|listen|get it|make sense)( my question| me|)",
            "(Shut up|Go away|Wrong|Nonsense|Boring|Stupid|Bad bot|Bad answer|Really bad|"
            "Terrible|Leave me alone|Are you kidding|What is wrong with you|Idiot|Damn|wtf)",
        ),
    ),
    (
        0.6,
        "All right.",
        (
            "(Ok|Okay|Okey|K|Kk|Yes|Yep|Yeah|Yup|Sure|Fine|Right|Alright|Got it|I see|I understand|"
            "Makes sense|Understood|Agreed|True|Exactly|Of course|Deal)(| then| sure| bot|"
            " ok| yes)",
        ),
    ),
    (
        0.8,
        "No problem.",
        (
            "(Sorry|I am sorry|My mistake|Oops|Pardon|Excuse me|My bad|Forgive me|I apologize|"
            "Never mind|Forget it|Nevermind|Ignore that)(| about that| for that| again| please|)",
        ),
    ),
    (
        1.0,
        "I did not understand that. Tell me something about you.",
        (
            "(<letters>|<letters> <letters>|<letters><num>|<num>|<num> <num>|<name>)",
            "(?|??|???|!|!!!|...|.|:|-|--|x|y|z|1|123|abc|asdf|qwerty|foo|bar|blah|blah blah|"
            "lorem ipsum|la la la|hm|hmm|huh|eh|uh|um|what|what?|pardon me)",
            "(Test|Testing|This is a test|Test test|Test 123|Just a test|Testing 1 2 3|ping)"
            "(| again| please| one two)",
            "(Say|Do|Tell me|Ask me|Show me) (something|anything|nothing|more)( else| please|)",
            "(Surprise|Entertain|Amuse|Impress) me( please| now|)",
        ),
    ),
)
_HI = ("Hello", "Hi", "Hey", "Hey there", "Hi there", "Good morning", "Hello there")
_CHOICE = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"<(\w+)>")


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Return a line of small talk, with its answer."""
    _, answer, patterns = rng.choices(_KINDS, [weight for weight, *_ in _KINDS])[0]
    text = _filled(rng, rng.choice(patterns))
    question = answer == TOY or re.match(
        r"(?i)(how|what|who|where|can|could|are|is|do|will|would)\b", text
    )
    text = _spoken(rng, re.sub(r" +", " ", text).strip() or "Hello", bool(question))
    return text, answer


def _filled(rng: random.Random, pattern: str) -> str:
    text = pattern.replace("\\(", "\0").replace("\\)", "\1")
    while (found := _CHOICE.search(text)) is not None:
        text = text[: found.start()] + rng.choice(found[1].split("|")) + text[found.end() :]
    while (found := _SLOT.search(text)) is not None:
        text = text[: found.start()] + _slot(rng, found[1]) + text[found.end() :]
    return text.replace("\0", "(").replace("\1", ")")


def _slot(rng: random.Random, name: str) -> str:
    if name == "hi":
        return rng.choice(_HI)
    if name == "num":
        return str(rng.randint(0, rng.choice((9, 99, 9999))))
    if name == "letters":
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9)))
    if name == "name":
        return name_for(rng, False)
    return rng.choice(_SLOTS[name].split("|"))


def _spoken(rng: random.Random, text: str, question: bool) -> str:
    """Write `text` as people do: greetings before it, no capitals, no signs, a slip."""
    if rng.random() < 0.1:
        opening = ("Hey, ", "Hi, ", "Hello, ", "So ", "Well, ", "Please ", "Ok, ", "And ", "Oh, ")
        text = rng.choice(opening) + text[0].lower() + text[1:]
    if rng.random() < 0.1 and text[-1].isalnum():
        closing = (", bot", ", robot", ", my friend", ", buddy", ", toy", ", computer", ", pal")
        text += rng.choice(closing)
    text = text[0].upper() + text[1:] if rng.random() < 0.6 else text.lower()
    if text[-1].isalnum():
        signs = ("?", "?", "?", "", "", "??", " ?") if question else (".", "", "", "!", "!!", "...")
        text += rng.choice(signs)
    if rng.random() < 0.06 and len(text) > 5:
        at = rng.randrange(1, len(text) - 2)
        text = text[:at] + rng.choice(("", text[at] * 2, text[at + 1])) + text[at + 1 :]
    return text
