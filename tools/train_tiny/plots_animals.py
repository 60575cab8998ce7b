"""Nine plots about an animal and five about something to eat. The form is that of `plots_things`."""

ANIMAL_PLOTS = {
    "lost_animal": """
One {weather} day, {he} went for a walk to the {place}. | One day, {he} walked along the {place} with {his} {family}.
There {he} saw {a_thing}. | Behind a rock, {he} found {a_thing}.
The {noun} was lost and cold. | The {noun} could not find its way home.
"Do not be afraid," said {name}. "I will help you." | "Let us find your mother," said {name}.
{He} gave it some water and held it close. | {He} put {his} jacket around it to keep it warm.
? They looked {hiding} and all around. | They walked past the trees and over a little bridge.
{friend} knew every path and showed them the way. | They asked {friend}, who had seen a big {noun} near the water.
At last, the mother came running. What a happy moment! | There was the mother of the little {color} {noun}!
Mother and child were so glad to be together again. | The {color} {noun} ran home as fast as it could.
And {name} waved until they were out of sight. | From then on, {name} came to see them every week.
""",
    "pet": """
{He} had a pet, {a_thing}. | {His} best friend was {a_thing}.
The {noun} could not do any tricks. | But the {noun} was afraid of everything, even of its own shadow.
So {name} took it to the {place} to teach it something new. | "I will teach you," said {name}.
First, the {noun} just sat there and looked at {him}. | They tried once, they tried twice, they tried ten times.
? "You can do it!" said {friend}. | It was not easy at all.
Then, one {weather} day, the {noun} jumped over a log. | After a week, the {noun} walked over a thin rope.
Everybody at the {place} clapped for the {color} {noun}. | What a clever {color} {noun} it was!
{name} gave it a big hug and a snack. | "I knew it," said {name}.
That night, they fell asleep side by side. | And {his} {family} was very proud of both.
""",
    "storm_night": """
In {his} house lived {a_thing} that slept on {his} bed. | One evening, {a_thing} sat in front of {his} door.
That night, there was a big storm. | Then all the lights went out.
{name} was afraid and hid under the blanket. | Boom! The thunder was so loud that {name} held {his} ears.
The {noun} was afraid too and came close to {him}. | The {color} {noun} shook from head to tail.
"We can be brave together," said {name}. | "If you are with me, I am not afraid," {he} said to the {color} {noun}.
They sang a song and counted from one to ten. | {He} told the {noun} a story about the {place}.
? Once more there was thunder, but far away. | Soon the rain grew quiet.
Then {his} {family} came in with a candle. | After a while, the dark did not look so bad.
In the morning, the sun was bright, and {name} felt proud. | They fell asleep, and in the morning the storm was gone.
""",
    "talking": """
At the {place}, {name} met {a_thing} that could talk. | One {weather} day, {a_thing} spoke to {him} at the {place}.
"Good morning!" said the {noun}. | "Please do not run away," said the {noun}. "I only want to talk."
At first, {name} could not believe it. | {name} looked left and right, but there was nobody else.
"How did you learn to speak?" {he} asked. | "I have never met {a_noun} like you," said {name}.
"I listened to the children at school," said the {color} {noun}. | "My grandmother taught me," said the {color} {noun}.
They talked about clouds and cookies and stars. | They told each other jokes until their bellies hurt.
? Nobody else could hear it. | Then {friend} came by, and the {noun} said only one word.
"Will you keep my secret?" asked the {noun}. | When it was late, the {noun} had to go home.
"I will," said {name}, and {he} did. | "See you tomorrow!" said {name}.
Now they meet at the {place} every Sunday. | And if you ever meet {a_noun} there, say hello.
""",
    "hurt": """
Near the {place}, {name} heard a sad sound. It came from {a_thing}. | One day, {he} saw {a_thing} that could not walk.
The {noun} had a thorn in its foot. | The foot of the {noun} was hurt.
"Hold still," said {name} in a soft voice. | {He} sat down next to it and spoke quietly.
Slowly, {he} pulled the thorn out. | {He} washed the foot and put a bandage on it.
? The {noun} closed its eyes and trusted {him}. | {friend} brought some clean water.
"All done!" said {name}. | The {color} {noun} stood up and took a small step.
A week later, {name} fell into a deep hole at the {place}. | One {weather} day, {name} got lost and did not know the way home.
Who came to help? It was the {color} {noun}! | Then the {color} {noun} came and showed {him} the way.
"You remembered me," said {name}. | One good turn brings another, thought {name}.
And they stayed friends for life. | They walked home together.
""",
    "shy": """
In the forest lived {a_thing} that was very shy. | Every day, {name} saw {a_thing} that always ran away.
{name} wanted to be its friend. | "Why does it hide?" asked {name}.
"You must be patient," said {his} {family}. | {His} {family} said, "Wait and be quiet."
So {he} sat down at the {place} with an apple and waited. | On the first day, {he} put some food on the ground and went away.
The {noun} came out from behind a bush and looked at {him}. | On the second day, the {noun} took a bite and ran.
? {He} did not move at all. | {name} just smiled.
Each day, the {color} {noun} came a little closer. | On the third day, the {color} {noun} stayed.
At last, it ate from {his} hand. | Then it put its head on {his} knee.
"Hello, friend," said {name}. | Nothing had ever felt so warm.
Good things take time, and {name} knew that now. | The next day, {friend} came along, and the {noun} was not shy at all.
""",
    "thief": """
Every night, something was missing from the kitchen, and {a_thing} had been seen near the house. | One morning, {his} lunch was gone, and outside sat {a_thing}.
"The {noun} took it!" said {friend}. | Everybody said that the {noun} was a thief.
But {name} was not so sure. | "Let us find out first," said {name}.
That night, {he} hid behind the door and waited. | {He} put flour on the floor to see the steps.
? It was dark and very quiet. | The clock struck ten, then eleven.
Then {an_animal} came in through the window! | And who came? Not the {noun} but {an_animal}!
"So it was you," said {name}. | The {animal} had a whole cookie in its mouth.
In the morning, {he} said sorry to the {color} {noun}. | Then {he} told everybody that the {color} {noun} had done nothing wrong.
From then on, {name} gave both of them something to eat. | It is wrong to blame somebody without looking, {name} said.
""",
    "show": """
The circus came to the {place}, and the star was {a_thing}. | There was a show at the {place} with {a_thing}.
{name} got a ticket from {his} {family}. | {name} sat in the first row with {friend}.
But the {noun} did not want to come out. | The music played, but the {noun} just stood there.
"It is sad," said {name}. | Only {name} saw that it was afraid.
{He} went to the {noun} and hummed a little song. | Quietly, {he} stepped closer and held out a hand.
? The people became quiet. | The {noun} lifted its head.
Then the {color} {noun} began to dance. | And the {color} {noun} turned around three times and bowed.
All the people stood up and clapped. | It was the best show of the year.
"You have a gift," said the man from the circus to {name}. | After the show, the {noun} followed {him} all the way home.
""",
    "river_crossing": """
{name} wanted to go to the other side of the river, and so did {a_thing}. | By the river, {he} met {a_thing} that looked at the water.
But the bridge was gone. | The water was deep and fast.
"I cannot swim," said {name}. | "What can we do?" asked {name}.
"I can swim, but I cannot see well," said the {noun}. | The {noun} said, "I am strong, but I do not know the way."
"Then I will be your eyes," said {name}. | So {name} had an idea and sat down on its back.
? "Left! Now right!" {he} called. | The water was cold.
Step by step, the {color} {noun} carried {him} over the river. | Slowly, the {color} {noun} swam, and {name} showed the way.
They came to the {place} before the sun went down. | On the other side, {his} {family} was waiting.
Together they could do what nobody could do alone. | "We make a good team," said {name}.
""",
}

FOOD_PLOTS = {
    "baking": """
{He} wanted to make {a_thing} for {his} {family}. | One {weather} morning, {name} and {his} {family} wanted to make {a_thing}.
First, they looked for a big bowl. | They washed their hands and got everything they needed.
Oh no! There was no sugar in the house. | Then {name} dropped an egg with a splat.
So {he} went to {friend} next door. | They laughed and cleaned it up.
? "I have some for you," said {friend}. | The kitchen looked like a snow field.
Soon there was a good smell in the whole house. | They waited and waited until it was ready.
At last, the {color} {noun} stood on the table. | What a fine {color} {noun} it was!
They ate it together, and nothing was left. | Then {friend} came, and they all ate together.
"You are a good cook," said {his} {family}. | That was the best {noun} {name} had ever eaten.
""",
    "too_much": """
At the market, {name} saw {a_thing}, the biggest one in the world. | For the summer party, {name} made {a_thing}.
It was so big that it did not fit through the door. | "Who will eat all that?" asked {his} {family}.
{name} ate and ate, but there was still so much left. | {He} took a bite, and another, and then {he} was full.
Then {an_animal} came and looked hungry. | {friend} came by and smelled it.
"Come and eat with me," said {name}. | "There is enough for everybody!" called {name}.
Soon the whole village sat at the {place} and ate. | More and more friends came, big and small.
? Somebody played the flute. | They told stories until late.
When the moon came up, the {color} {noun} was gone. | In the end, only a crumb of the {color} {noun} was left.
Food tastes best when you share it. | And {name} was full and happy.
""",
    "missing": """
{He} put {a_thing} on the table and went out. | On the table, there was {a_thing} for {his} birthday.
When {name} came back, the {noun} was gone! | An hour later, the plate was empty.
"Who ate my {noun}?" asked {name}. | "Where is it?" cried {name}.
{He} asked {his} {family}, who did not know. | {He} asked {friend}, but {friend} had been at the {place}.
Then {he} saw crumbs on the floor. | On the ground were small {color} crumbs.
The crumbs went out of the door and over to the {place}. | One by one, {he} followed them down the road.
There sat {an_animal} with a round belly. | At the end was {an_animal}, and it looked sorry.
"I was so hungry," said the {animal}. | The {animal} said, "It smelled so good."
{name} had to laugh. "Next time, just ask me." | So they made a new {color} {noun}, and this time they ate it together.
""",
    "stone_chef": """
A king wanted to eat {a_thing}, but no cook could make it. | One day, a letter came: "Please bring {a_thing} to the castle!"
"I can do it," said {name}. | {name} was only a child, but {he} could cook well.
{He} took a pot, a spoon and a secret from {his} {family}. | On the way to the castle, {he} picked some herbs at the {place}.
In the kitchen, the other cooks laughed at {him}. | The cook of the castle, who was called {friend}, wanted to help.
But {name} stirred and hummed and stirred. | {He} worked all night.
? A cat sat by the fire and watched. | The smell woke up the whole castle.
The king took one bite of the {color} {noun} and smiled. | In the morning, the {color} {noun} was ready.
"That is how my mother made it," said the king. | "More, please!" said the king.
The secret was simple: cook with love. | And {name} became the youngest cook in the land.
""",
    "lunch_trade": """
Every day, {name} had {a_thing} in {his} lunch box. | For lunch, {name} had {a_thing}.
"Not again," {he} said. | {He} sat down at the {place} to eat.
Next to {him} sat {friend}, who had nothing at all. | Then {friend} came, whose lunch had fallen into the mud.
"You can have half of it," said {name}. | {name} thought about it and cut the {noun} into two parts.
? They ate slowly. | Not a word was said.
"This is the best {color} {noun} I ever had!" said {friend}. | {friend} loved the {color} {noun}.
And now it tasted good to {name} too. | Suddenly, {name} liked it as well.
The next day, {friend} brought apples for both of them. | From then on, they ate together every day.
So one {noun} made two friends. | And {his} {family} wondered why the lunch box was always empty.
""",
}
