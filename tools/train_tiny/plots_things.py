"""Sixteen plots about a thing. A line is a step, `|` parts its alternatives, `?` marks a step that may be left out.

`he`, `him` and `his` stand for the hero's pronouns and for nobody else's: friends and animals go by name, quotations
speak of "I" and "you". So the evaluation may ask that every pronoun of a story has the hero's gender.
"""

THING_PLOTS = {
    "lost": """
{He} had {a_thing} that {he} loved very much. | One of {his} favorite toys was {a_thing}. | {He} took {a_thing} everywhere.
One {weather} day, {name} could not find the {noun}. | One morning, the {noun} was gone. | On the way to the {place}, {he} lost the {noun}.
{He} looked in the house and outside, but it was not there. | {He} looked and looked, but {he} could not see it anywhere.
? {He} felt sad and began to cry. | A tear ran down {his} face.
Then {his} {family} said, "Do not worry. We will look for it together." | Then {his} friend {friend} said, "I will help you find it."
They looked at the {place} and all around the house. | They walked slowly and looked up and down.
At last, they saw the {color} {noun} {hiding}. | Soon they saw something {color}. It was the {noun}, {hiding}!
{name} was so happy that {he} jumped up and down. | With a big smile, {name} picked it up and said, "Thank you!"
From that day on, {name} always put the {noun} in a safe place. | That night, {name} slept well with the {noun} close by.
""",
    "stuck": """
One {weather} day, {he} took {a_thing} to the {place}. | {He} liked to play with {a_thing} at the {place}.
Suddenly, the wind blew, and the {noun} flew up into a tall tree. | {He} threw the {noun} too high, and it got stuck in a tree.
{name} jumped and jumped, but {he} could not reach it. | {He} tried with a long stick, but it was too short.
Just then, {an_animal} came by. | Then {an_animal} walked up to {him}.
The {animal} asked, "Why are you sad?" | The {animal} said, "What is wrong, my friend?"
Then {name} said, "My {noun} is stuck in the tree." | So {name} pointed up and said, "I cannot get my {noun}."
The {animal} shook the tree until the {color} {noun} fell down. | The {animal} called a bird, and the bird dropped the {color} {noun} down.
"Thank you!" said {name} and hugged the {animal}. | Now {name} laughed and thanked the {animal}.
? They played together until the sun went down. | They ran around the tree three times.
From then on, {name} and the {animal} were best friends. | It was the best day {name} had ever had.
""",
    "sharing": """
For {his} birthday, {name} got {a_thing} from {his} {family}. | One day, {name} got {a_thing} as a gift.
The next day, {his} friend {friend} came to play. | Then {he} met {friend} at the {place}.
"Can I play with your {noun} too?" asked {friend}. | Soon {friend} said, "I like your {noun}. May I try it?"
"No, it is mine!" said {name}. | But {name} did not want to share and held the {noun} tight.
So {friend} was sad and walked away. | So {friend} sat down alone and looked at the ground.
Now {name} played alone, but it was no fun. | Soon {name} felt bad.
Then {he} ran to {friend} and said, "I am sorry. Let us play together." | At last {he} gave the {color} {noun} to {friend} and said, "Now it is your turn."
A smile came back to the face of {friend}. | They took turns until it was dark.
That day, {name} learned that sharing makes everything more fun. | And {name} knew that a good friend is better than any {noun}.
""",
    "broken": """
{He} had {a_thing} from {his} {family}. | In {his} room there was {a_thing} that {he} liked best of all.
One {weather} day, {name} ran too fast, and the {noun} fell and broke. | One day, the {noun} slipped from {his} hands and broke into two parts.
? "Oh no!" cried {name}. | For a long time, {name} just stood there.
{He} was afraid to tell {his} {family}. | At first, {he} wanted to hide it {hiding}.
But {name} was honest and told the whole story. | Then {he} took a deep breath and told {his} {family} what had happened.
"Thank you for telling me," said {his} {family}. "We can fix it." | So {his} {family} smiled and said, "Everybody breaks something now and then."
They got some glue and worked all afternoon. | Together they put the parts back in place and waited for the glue to dry.
In the end, the {color} {noun} looked almost like new. | Soon the {color} {noun} was as good as before.
And {name} learned that it is best to tell the truth. | From then on, {name} was very careful with it.
""",
    "found": """
One {weather} day, {name} walked to the {place} and found {a_thing}. | On a walk near the {place}, {he} saw {a_thing} on the ground.
? It was the nicest {noun} {he} had ever seen. | Nobody was there.
"Whose {noun} is this?" {he} thought. | {He} wanted to keep it, but {he} knew that somebody must miss it.
So {name} asked {his} {family}, who did not know. | First {he} asked {an_animal}, but the {animal} shook its head.
Then {he} put up a sign that said, "Found: {a_thing}." | Then {he} went from door to door and asked everybody.
The next day, {friend} came running. "That is my {noun}!" | In the last house lived {friend}, who shouted, "My {noun}! You found it!"
With a smile, {name} gave the {noun} back. | It was hard to give it back, but {name} did.
"You are so kind," said {friend}. "Do you want to be my friend?" | To say thank you, {friend} asked {name} to stay for lunch.
So {name} lost {a_noun} but found a friend. | They have been friends ever since.
""",
    "race": """
There was a big race at the {place}, and the prize was {a_thing}. | Every year, the village held a race, and this year the winner would get {a_thing}.
How much {name} wanted that {noun}! | At once, {name} knew that {he} wanted to win the {noun}.
Every morning, {he} ran around the {place}. | For a whole week, {he} ran up and down the hill with {his} {family}.
On the day of the race, {name} ran as fast as {he} could. | The race began, and soon {name} was ahead of everybody.
Then {he} saw that {friend} had fallen down. | But near the end, {friend} fell over a stone and began to cry.
So {name} stopped and helped {friend} up. | At once {he} turned back and held out a hand.
They walked over the line together, and they were the last. | Of course, all the others came in before them.
But everybody clapped, and {name} got the {color} {noun} for having a good heart. | But the judge said, "The {color} {noun} goes to the kindest runner," and gave it to {name}.
? That was better than being fast. | Then {friend} gave {him} a hug.
And they played with the {noun} all day long. | It stands in {his} room to this day.
""",
    "wish": """
One night, {name} saw a falling star and made a wish for {a_thing}. | More than anything, {he} wished for {a_thing}.
The next morning, {he} looked {hiding}, but nothing was there. | But the days went by, and no {noun} came.
"Wishes need a little help," said {his} {family}. | Then {his} {family} said, "Let us make one."
So they went to the {place} to find what they needed. | So {name} got some paper, wood and string.
They cut and painted and glued all day. | It was hard work, but {he} did not give up.
? Their hands were full of {color} paint. | Even the {animal} next door came to look.
When the sun went down, the {color} {noun} was ready. | At last, {he} held {a_thing} in {his} hands.
"This is better than any wish," said {name}. | It was a bit crooked, but {name} thought it was perfect.
That night, {name} thanked the star anyway. | And {he} was proud because it was {his} own work.
""",
    "trade": """
{He} had {a_thing} but {he} wanted something new. | At home, {he} had {a_thing}, and {he} was tired of it.
So {he} took the {noun} to the {place} to trade it. | So one {weather} day, {he} went to the {place} with the {noun}.
There {he} met {friend}, who gave {him} a drum for it. | There {friend} gave {him} a bag of marbles for the {noun}.
At first, {name} was glad. | For an hour, that was fun.
But soon {he} missed the {color} {noun} very much. | But at night {he} could not sleep, because {he} missed the {color} {noun}.
In the morning, {he} ran to the house of {friend}. | The next day, {he} went to {friend} and asked, "Can we trade back?"
"I hoped that you would come," said {friend}. | With a laugh, {friend} said, "I missed my own things too."
So they traded back, and both were happy. | They shook hands and played together with everything they had.
Now {name} knows that old things can be the best things. | After that, {name} never wanted to give away the {noun} again.
""",
    "secret_door": """
In the attic, {name} found {a_thing} inside an old chest. | One {weather} day, {he} found {a_thing} {hiding}.
When {he} touched the {noun}, it began to glow. | The {noun} was warm, and it hummed a quiet song.
Suddenly, a little door opened in the wall. | Then a tiny door appeared, as high as {his} knee.
Behind the door stood {an_animal} with a tall hat. | Out came {an_animal} that could talk.
"We have waited for you," said the {animal}. "We need the {color} {noun}." | The {animal} said, "Please help us. Without the {color} {noun}, our land is dark."
Was {name} afraid? Only a little. | At once, {name} said, "I will help you."
{He} carried the {noun} through the door and held it up high. | Together they walked through the door to a dark {place}.
Light came back, and everybody cheered. | At once, the flowers opened and the birds began to sing.
? The {animal} bowed and said, "You are our hero." | There was a party with music and cake.
Then {name} went home in time for dinner. | In the evening, {he} was back in {his} own bed, and the {noun} still glowed.
""",
    "cleanup": """
{His} room was a big mess, and somewhere in it was {a_thing}. | Toys lay all over {his} room, and under them lay {a_thing}.
"Please clean up," said {his} {family}. | One day, {friend} came to play, but there was no room to sit.
But {name} did not want to. | "Later," said {name} and went to the {place}.
In the evening, {he} wanted the {noun} and could not find it. | Then {he} stepped on something in the dark. Ouch!
So {name} began to clean, one thing after the other. | "Now I see," said {name} and began to put things away.
? {He} sang a little song while {he} worked. | It took a long time.
And there, {hiding}, was the {color} {noun}! | At the very bottom was the {color} {noun}, a bit dusty but fine.
"A tidy room is a happy room," said {his} {family}. | Then {he} put the {noun} on the shelf, where everybody could see it.
Since then, {name} cleans up every evening. | And {name} slept well in {his} tidy room.
""",
    "river": """
{He} built a little raft for {a_thing}. | One {weather} day, {name} sat by the river with {a_thing}.
Splash! The {noun} fell into the water. | Then the {noun} rolled down the bank and fell into the river.
The water carried it away, past the {place}. | Away it went, faster and faster.
{name} ran along the river, but {he} was too slow. | "Come back!" shouted {name}, but the river did not listen.
A big {animal} saw it all. | In the water there was {an_animal}.
The {animal} swam after the {noun} and caught it. | With one jump, the {animal} stopped the {color} {noun}.
It brought the {color} {noun} back to {name}. | Dripping wet, the {animal} put the {color} {noun} at the feet of {name}.
"You are so brave!" said {name}. | {He} gave the {animal} an apple to say thank you.
From that day on, {he} came to the river to see the {animal}. | After that, {name} tied a string to the {noun}.
""",
    "new_school": """
It was {his} first day at a new school, and {name} brought {a_thing}. | When {name} came to a new school, {he} had {a_thing} in {his} bag.
{He} did not know anybody. | Nobody talked to {him}, and {he} felt small.
At lunch, {he} sat alone and took out the {noun}. | In the break, {he} stood by the wall and held the {color} {noun}.
"Wow, what a nice {noun}!" said a voice. It was {friend}. | Then {friend} came over and asked, "Is that your {noun}?"
"Do you want to see how it works?" asked {name}. | So {name} showed {friend} how to play with it.
Soon more and more children came to look at the {color} {noun}. | They laughed so much that other children came too.
? Even the teacher wanted to try it. | Somebody shared a cookie with {name}.
When school was over, {name} had five new friends. | At the end of the day, {name} did not want to go home.
"How was school?" asked {his} {family}. "Great!" said {name}. | That night, {he} told {his} {family} all about {friend}.
""",
    "storm": """
Last summer, {name} made a camp at the {place} and hung up {a_thing}. | One evening, {name} went to the {place} with {his} {family} and {a_thing}.
Soon dark clouds came, and the rain began to fall. | Then the wind grew strong, and there was thunder.
They ran into a cave and could not see a thing. | They lost the path and did not know where to go.
? "Stay close to me," said {his} {family}. | An owl called in the dark.
Then {name} had an idea. | But {name} stayed calm.
{He} held up the {color} {noun} as high as {he} could. | {He} tied the {color} {noun} to a long stick and waved it.
Far away, {friend} saw something {color} and came with a lamp. | In the village, {friend} saw the {color} spot and knew where to look.
"I saw your {noun}!" said {friend}. "Come with me." | Soon they were all warm and dry in the house of {friend}.
They drank hot milk and listened to the rain. | And everybody said that {name} had saved the day.
""",
    "garden_magic": """
An old woman gave {name} {a_thing} and said, "Put it into the ground." | At the market, {name} bought {a_thing} that was said to be magic.
{He} put the {noun} into the garden and gave it water. | In the garden, {he} dug a hole for the {noun}.
Nothing happened for six days. | "This is silly," said {his} {family}, but {name} waited.
On day seven, a little tree stood there. | One morning, a small green plant came out of the ground.
And on the tree grew one {color} {noun} after the other! | It grew and grew, and at the top hung a second {color} {noun}.
What would {name} do with so many? | {He} laughed and danced around the tree.
? {He} gave the first one to {friend}. | Even {an_animal} came to look.
In the end, every child at the {place} had {a_noun}. | So {name} gave one to each child in the village.
And {he} kept just one, the {noun} that started it all. | The best magic, {he} thought, is to give.
""",
    "contest": """
{name} wanted to show {a_thing} at the village fair. | For the fair at the {place}, {name} painted {a_thing}.
But {friend} had a much bigger {noun}. | Then {he} saw that {friend} had one too, and it was twice as big.
"Mine is too small," said {name} and hung {his} head. | For a moment, {name} wanted to go home.
"It is not about the size," said {his} {family}. | But {his} {family} said, "You worked hard. Be proud of it."
So {name} put the {color} {noun} on the table. | So {he} cleaned the {color} {noun} until it was bright.
? Everybody came to look. | The judges walked by slowly, one after the other.
The judges looked at the {noun} for a long time. | An old judge with glasses smiled at it.
First prize went to {friend}, and {name} clapped loudest of all. | In the end, {name} and {friend} both won a prize.
"Next year we will make one together," said {friend}. | They went home arm in arm.
""",
    "moon": """
One night, {name} looked at the moon and saw {a_thing} there. | One night, {name} could not sleep. {He} looked at the moon, and on it lay {a_thing}.
"How did {a_noun} get up there?" {he} asked. | At first, {name} could not believe it.
With a long ladder, {he} climbed up to see. | So {he} built a ladder, higher than all the trees, and climbed up.
On the moon lived {an_animal} that was all alone. | Behind a hill sat {an_animal} and looked at the stars.
"I have nobody to play with," said the {animal}. | The {animal} said, "You are the first friend who has come to see me."
So they played with the {color} {noun} until the sun came up. | So {name} showed the {animal} the {color} {noun}, and they laughed together.
Then it was time to go home. | "I must go now," said {name}, "but I will come back."
{He} left the {noun} with the {animal}, so that it would not be lonely. | The {animal} waved until {name} was only a small dot.
Now, when the moon is bright, {name} looks up and waves. | In the morning, there was moon dust on {his} shoes.
""",
}
