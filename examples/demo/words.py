"""The word lists of the demo commands, and a generator of made-up words.

All lists were written for this demo. A made-up word such as ``velkamo`` is not in any list, so the
denoiser can only write it into a call by copying it from the command.
"""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


ROOMS = _words(
    "kitchen,bedroom,bathroom,living room,hallway,office,garage,basement,attic,dining room,nursery,study,guest room,"
    "laundry room,porch,library,playroom,pantry"
)
COLORS = _words("red,green,blue,yellow,orange,purple,pink,white,warm white,turquoise")
DOORS = _words("front,back,garage,patio,side,cellar,balcony,garden")
WEEKDAYS = _words("monday,tuesday,wednesday,thursday,friday,saturday,sunday")
LISTS = _words("shopping,packing,grocery,party,to do,camping,gift,hardware")
SEATS = _words("driver,passenger,rear left,rear right")
DIRECTIONS = _words("forward,backward,left,right")

APPLIANCES = _words(
    "coffee,kettle,oven,dishwasher,washing machine,dryer,toaster,rice cooker,air purifier,sprinkler,pool pump,humidifier"
)
SHOPS = _words(
    "pharmacy,bakery,florist,supermarket,bookshop,hardware store,barber,cafe,pizzeria,cash machine,petrol station,car park,"
    "bike shop,vet,cinema,playground,tailor,fish market,launderette,tea house,charging point,ice cream parlour"
)
WHICH = _words("first,second,next,last")
ENTRIES = _words("meeting,appointment,call,lesson")

NAMES = _words(
    "anna,ben,carla,david,elena,frank,grace,henry,irene,jonas,katja,leo,maria,nils,olga,peter,quentin,rosa,samir,tara,"
    "ulrich,vera,walter,xenia,yusuf,zoe,alice,boris,clara,dmitri,emma,felix,gita,hugo,ines,jamal,kira,lukas,mina,noah,"
    "oscar,paula,rashid,sofia,tom,ursula,viktor,wendy,amir,bella,chen,diego,esther,farid,gloria,hassan,ida,jorge,karl,"
    "lena,mum,dad,grandma,grandpa"
)
VERBS = _words(
    "call,buy,fix,clean,water,feed,pay,book,cancel,check,collect,return,wash,paint,repair,order,pack,print,sign,renew,"
    "email,visit,charge,replace,sort,empty,fill,move,sell,borrow,measure,cook,bake,freeze,iron,fold,sharpen,polish,"
    "install,update,review,finish,start,write,read,record,post,wrap,lock,test,find,bring,drop off,pick out"
)
NOUNS = _words(
    "garage,bike,dentist,plants,cat,dog,rent,car,invoice,ticket,parcel,library book,passport,sofa,fence,roof,window,"
    "lamp,carpet,oven,fridge,laundry,letter,report,contract,suitcase,shoes,jacket,coat,guitar,piano,camera,phone,laptop,"
    "printer,battery,charger,cable,ladder,hammer,drill,paint,brush,bucket,mop,towel,blanket,pillow,curtain,mirror,clock,"
    "radio,television,speaker,vase,garden,lawn,hedge,tree,pond,shed,gate,mailbox,stairs,boiler,filter,pipe,sink,tap,"
    "doctor,plumber,teacher,neighbour,lawyer,baker,butcher,bank,school,office,meeting,party,wedding,concert,lesson,"
    "homework,project,budget,insurance,licence,tax form,photo,painting,candle,cake,soup,salad,dinner,lunch,breakfast,"
    "medicine,glasses,keys,wallet,umbrella,helmet,tent,boat,kayak,tyres,brakes,engine,trailer,robot,drone,telescope"
)
ADJECTIVES = _words(
    "old,new,big,small,blue,red,green,broken,clean,dirty,heavy,light,wooden,metal,plastic,round,square,cheap,expensive,"
    "warm,cold,soft,hard,spare,second,first,last,empty,full,long,short,quiet,loud,bright,dark,fresh,dry,wet,sharp,thin,"
    "thick,rusty,shiny,yellow,white,black,silver,golden,striped,tiny"
)
FOODS = _words(
    "milk,bread,eggs,butter,cheese,apples,pears,bananas,grapes,lemons,oranges,onions,garlic,potatoes,carrots,tomatoes,"
    "lettuce,spinach,peppers,mushrooms,rice,pasta,flour,sugar,salt,pepper,olive oil,vinegar,honey,jam,coffee,tea,juice,"
    "water,beer,wine,chicken,beef,fish,tofu,beans,lentils,nuts,yogurt,cream,chocolate,biscuits,crisps,soap,shampoo,"
    "toothpaste,tissues,batteries,light bulbs,bin bags,cat food,dog food,nappies,candles,matches,foil,sponges"
)
PLACES = _words(
    "airport,train station,city hall,old mill,harbour,museum,theatre,stadium,hospital,pharmacy,bakery,supermarket,"
    "car wash,petrol station,post office,swimming pool,zoo,castle,cathedral,university,ferry terminal,campsite,"
    "lighthouse,market square,golf course,shopping centre,botanical garden,ice rink,nearest charger,town library"
)
POINTS = _words(
    "dock,gate,warehouse,entrance,loading bay,reception,workshop,fence,lobby,stairwell,parking lot,storage room,"
    "canteen,lift,server room,cold store,charging station,north corner,south corner,east wing,west wing"
)
OBJECTS = _words(
    "mug,cup,bottle,box,book,ball,toy,plate,bowl,screwdriver,wrench,crate,package,tray,basket,pen,folder,glove,can,jar,"
    "brick,cube,cone,cylinder,spool,battery,gear,bolt,sock,remote"
)
SURFACES = _words(
    "table,shelf,desk,counter,workbench,conveyor,floor,cart,pallet,bin,drawer,cabinet,sink,chair,bench,rack"
)
GENRES = _words(
    "jazz,blues,rock,folk,techno,opera,reggae,salsa,funk,soul,disco,country,punk,classical piano,film music,"
    "relaxing guitar,nineties pop,rain sounds,dinner jazz,kids songs,workout mix,morning news"
)
STATEMENTS = _words(
    "i'm running late,i'm on my way,we're out of time,dinner is ready,the meeting is over,i can't make it,"
    "see you soon,don't wait for us,i'll be there,it's raining here,the train is delayed,happy birthday,"
    "call me back,good luck,we've arrived,i forgot,bring,we need,i left,please return,i found,don't forget,"
    "she likes,he lost,they bought,i'll cook,let's meet near,i parked near,thanks for"
)
QUESTIONS = _words(
    "how to fix,how to cook,who invented,why is,history of,best recipe with,reviews of,opening hours of,price of,"
    "how old is,meaning of,cheap tickets for,weather near,where to buy,symptoms of"
)

OPENINGS = _words(
    "please,could you,can you,would you,hey,okay,um,uh,so,well,hi,i'd like you to,could you please,can you please,"
    "hey there,excuse me,right,now,okay so,would you please"
)
CLOSINGS = _words(
    "please,thanks,thank you,if you can,will you,would you,right now,when you can,okay"
)
FILLERS = _words("um,uh,er,like,you know")

_ONSETS = _words("b,c,d,f,g,h,j,k,l,m,n,p,r,s,t,v,w,z,br,ch,dr,fl,gr,kl,pl,sh,st,th,tr")
_VOWELS = _words("a,e,i,o,u,a,e,i,o,ai,ea,ou")
_CODAS = _words(",,,,n,r,l,s,t,m,k,nd,rt,x")

ONES = _words(
    "zero,one,two,three,four,five,six,seven,eight,nine,ten,eleven,twelve,thirteen,fourteen,fifteen,sixteen,seventeen,"
    "eighteen,nineteen"
)
TENS = _words(",,twenty,thirty,forty,fifty,sixty,seventy,eighty,ninety")


def made_up_word(rng: random.Random) -> str:
    """Return a made-up word that can be pronounced, such as ``velkamo``.

    The word has at least four letters, because a shorter word could be ``the`` or ``to``.
    """
    word = ""
    while len(word) < 4:
        word = "".join(
            rng.choice(_ONSETS)
            + rng.choice(_VOWELS)
            + (rng.choice(_CODAS) if rng.random() < 0.5 else "")
            for _ in range(rng.choice((1, 2, 2, 2, 3)))
        )
    return word


def number_words(number: int) -> str:
    """Return a number from 0 to 999 in English words, without hyphens and without ``and``, such as
    ``one hundred eighty``.
    """
    if number >= 100:
        rest = f" {number_words(number % 100)}" if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
