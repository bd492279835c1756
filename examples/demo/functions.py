"""The functions that a command can call, and the templates of the commands.

A template consists of literal words, ``[optional]`` parts, ``(one|of|these)`` alternatives, and
slots. A slot ``{argument=kind}`` is replaced by a random value of this kind, and ``{argument}`` is
short for ``{argument=argument}``. ``values.py`` generates the values, and ``data.py`` fills the
templates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """A function that the demo can call, with its templates.

    The arguments have the same order as in calls.
    """

    name: str
    arguments: tuple[str, ...]
    training: tuple[str, ...]
    held_out: tuple[str, ...]


FUNCTIONS = (
    Function(
        "set_light",
        ("room", "state", "brightness", "color"),
        (
            "(turn|switch) {state=on_off} the {room} (light|lights|lamp)",
            "(turn|switch) the {room} (light|lights|lamp) {state=on_off}",
            "{room} (light|lights) {state=on_off}",
            "(dim|set) the {room} (light|lights) to {brightness=percent} percent",
            "(make|turn|set) the {room} (light|lights) {color}",
            "[i want] the {room} (light|lights) in {color} at {brightness=percent} percent",
            "set the (light|lights|lamp) in the {room} to {color}[ and {brightness=percent} percent]",
            "(turn|switch) {state=on_off} the (light|lights) in the {room}",
        ),
        (
            "(turn|switch) the (light|lights|lamp) in the {room} {state=on_off}",
            "(dim|set) the (light|lights) in the {room} to {brightness=percent} percent",
        ),
    ),
    Function(
        "set_thermostat",
        ("temperature", "room"),
        (
            "set the (thermostat|heating) to {temperature}[ degrees][ in the {room}]",
            "(heat|warm) the {room} to {temperature} degrees",
            "make it {temperature} degrees[ in the {room}]",
            "(turn|put) the (thermostat|heating) in the {room} to {temperature}[ degrees]",
            "i'd like {temperature} degrees in the {room}",
            "change the {room} (thermostat|temperature) to {temperature}[ degrees]",
        ),
        ("set the {room} (heating|temperature) to {temperature}[ degrees]",),
    ),
    Function(
        "set_blinds",
        ("room", "position"),
        (
            "{position=open_close} the (blinds|shutters|curtains) in the {room}",
            "{position=open_close} the {room} (blinds|shutters|curtains)",
            "(blinds|shutters|curtains) {position=up_down} in the {room}",
            "(move|set) the {room} (blinds|shutters|curtains) to {position=percent} percent",
            "(pull|put) the (blinds|shutters|curtains) in the {room} {position=up_down}",
            "put the (blinds|shutters) in the {room} at {position=percent} percent",
        ),
        ("(pull|put) the {room} (blinds|shutters|curtains) {position=up_down}",),
    ),
    Function(
        "set_timer",
        ("duration", "unit", "label"),
        (
            "set a timer for {duration=amount} {unit}[ for {label}]",
            "set a timer[ for {label}] for {duration=amount} {unit}",
            "start a {duration=amount} {unit} timer[ for {label}]",
            "(count down|wait) {duration=amount} {unit}[ for {label}]",
            "timer {duration=amount} {unit}[ for {label}]",
            "give me {duration=amount} {unit}[ for {label}]",
            "i need a timer called {label} for {duration=amount} {unit}",
        ),
        (
            "start a timer for {duration=amount} {unit}[ called {label}]",
            "i need a {duration=amount} {unit} timer[ for {label}]",
        ),
    ),
    Function(
        "add_reminder",
        ("text", "time", "day"),
        (
            "remind me to {text=task}[ at {time}][ {day}]",
            "remind me [{day} ]to {text=task}[ at {time}]",
            "remind me {day} at {time} to {text=task}",
            "(set|add|create) a reminder to {text=task}[ {day}][ at {time}]",
            "(set|add|create) a reminder for {day}[ at {time}] to {text=task}",
            "don't let me forget to {text=task}[ {day}][ at {time}]",
            "i (need|have) to {text=task} {day}[ at {time}], remind me",
            "at {time} remind me to {text=task}",
            "make sure i {text=task} {day}[ at {time}]",
        ),
        (
            "remind me at {time}[ {day}] to {text=task}",
            "don't let me forget to {text=task} at {time}[ {day}]",
        ),
    ),
    Function(
        "add_to_list",
        ("items", "list"),
        (
            "add {items} to (my|the|our) {list} list",
            "add {items} to (my|the) list",
            "put {items} on (my|the|our) {list} list",
            "put {items} on (my|the|our) list",
            "write {items} on the {list} list",
            "(we need|we're out of|i need to buy) {items}",
            "on the {list} list put {items}",
            "my {list} list needs {items}",
        ),
        (
            "to (my|the|our) {list} list add {items}",
            "write {items} on (my|the) list",
        ),
    ),
    Function(
        "play_music",
        ("query", "room"),
        (
            "play {query=music}[ in the {room}]",
            "(put on|start) {query=music}[ in the {room}]",
            "i (want|would like) to hear {query=music}[ in the {room}]",
            "in the {room} play {query=music}",
            "let's (listen to|hear) {query=music}[ in the {room}]",
            "play me {query=music} on the {room} speaker",
        ),
        (
            "i (want|would like) to listen to {query=music}[ in the {room}]",
            "start {query=music} on the {room} speaker",
        ),
    ),
    Function(
        "clean_rooms",
        ("rooms", "mode"),
        (
            "clean {rooms}",
            "{mode=clean_mode} {rooms}",
            "(send|start) the vacuum robot to {mode=clean_mode} {rooms}",
            "have the robot clean {rooms}",
            "{rooms} (needs|need) cleaning",
            "it's time to {mode=clean_mode} {rooms}",
            "let the robot {mode=clean_mode} {rooms}",
        ),
        (
            "have the robot {mode=clean_mode} {rooms}",
            "it's time to clean {rooms}",
        ),
    ),
    Function(
        "lock_door",
        ("door", "locked"),
        (
            "{locked=locking} the {door} door",
            "(make sure|check that) the {door} door is {locked}",
            "i want the {door} door {locked}",
            "the {door} door should be {locked}",
            "keep the {door} door {locked}",
            "{locked=locking} the door called {door}",
        ),
        ("(leave|keep) the door called {door} {locked}",),
    ),
    Function(
        "navigate",
        ("destination", "stops", "avoid"),
        (
            "(navigate|drive|go) to {destination=place}[ with a stop at {stops}]",
            "take me to {destination=place}[ via {stops}]",
            "(find|show) (the|a) way to {destination=place}[ avoiding {avoid}]",
            "drive (us|me) to {destination=place}[ via {stops}][ avoiding {avoid}]",
            "i (need|have) to get to {destination=place}[ without {avoid}]",
            "go via {stops} to {destination=place}",
            "(navigate|drive) to {destination=place} and avoid {avoid}",
            "set the destination to {destination=place}[ with a stop at {stops}]",
        ),
        (
            "take (us|me) to {destination=place}[ with a stop at {stops}]",
            "i (need|have) to go to {destination=place}[ avoiding {avoid}]",
        ),
    ),
    Function(
        "set_climate",
        ("temperature", "fan", "zone"),
        (
            "set the (car|cabin|air conditioning) to {temperature}[ degrees]",
            "set the {zone=seat} (zone|side) to {temperature}[ degrees]",
            "(turn|set) the fan to {fan}",
            "(car|cabin) temperature {temperature}[ degrees][ with the fan at {fan}]",
            "(cool|heat) the (car|cabin) to {temperature}[ degrees][ on the {zone=seat} side]",
            "air conditioning to {temperature} degrees[ and fan to {fan}]",
            "fan (level|speed) {fan}[ on the {zone=seat} side]",
        ),
        (
            "(turn|put) the air conditioning to {temperature}[ degrees][ with the fan at {fan}]",
            "(turn|set) the fan on the {zone=seat} side to {fan}",
        ),
    ),
    Function(
        "set_window",
        ("window", "position"),
        (
            "{position=open_close} the {window=seat} window",
            "roll the {window=seat} window {position=up_down}",
            "(set|move) the {window=seat} window to {position=percent} percent",
            "(open|lower) the {window=seat} window to {position=percent} percent",
            "i want the {window=seat} window at {position=percent} percent",
            "{position=open_close} the window on the {window=seat} side",
        ),
        ("(set|move) the window on the {window=seat} side to {position=percent} percent",),
    ),
    Function(
        "heat_seat",
        ("seat", "level"),
        (
            "(set|turn) the {seat} seat (heating|heater) to[ level] {level}",
            "(heat|warm) the {seat} seat",
            "(heat|warm) the {seat} seat at level {level}",
            "seat heating {level} for the {seat} seat",
            "{seat} seat heating (at|to) {level}",
            "(turn on|start) the {seat} seat (heating|heater)",
        ),
        ("(turn on|start) the {seat} seat (heating|heater) at level {level}",),
    ),
    Function(
        "call_contact",
        ("contact", "phone"),
        (
            "(call|ring|phone|dial) {contact}",
            "(call|ring) {contact} on (his|her|the) {phone} (phone|number)",
            "make a call to {contact}",
            "get {contact} on the line",
            "i (want|need) to (talk|speak) to {contact}",
            "(call|dial) the {phone} number of {contact}",
            "start a call with {contact}",
        ),
        (
            "i (want|need) to (call|ring) {contact}[ on the {phone} number]",
            "(ring|phone) the {phone} number of {contact}",
        ),
    ),
    Function(
        "send_message",
        ("contact", "text"),
        (
            "(tell|text|message) {contact} that {text=message}",
            "send a (message|text) to {contact} saying {text=message}",
            "send {contact} a (message|text) saying {text=message}",
            "(text|write) to {contact}, {text=message}",
            "let {contact} know that {text=message}",
            "write {contact} a message that says {text=message}",
            "message to {contact}, {text=message}",
        ),
        (
            "send a (message|text) to {contact} that says {text=message}",
            "(text|message) {contact} saying {text=message}",
        ),
    ),
    Function(
        "move",
        ("direction", "distance"),
        (
            "(move|go|drive|roll) {direction} {distance=metres}",
            "(move|go|drive) {distance=metres} {direction}",
            "(move|go) {direction}",
            "robot {direction} {distance=metres}",
            "{distance=metres} {direction} please",
            "(take|make) a step {direction}",
        ),
        ("robot, (roll|drive) {distance=metres} {direction}",),
    ),
    Function(
        "turn",
        ("direction", "degrees"),
        (
            "turn {direction=side} {degrees=angle} degrees",
            "turn {degrees=angle} degrees[ to the] {direction=side}",
            "(rotate|spin) {direction=side} by {degrees=angle} degrees",
            "turn[ to the] {direction=side}",
            "(rotate|spin) {degrees=angle} degrees to the {direction=side}",
        ),
        ("turn to the {direction=side} by {degrees=angle} degrees",),
    ),
    Function(
        "pick_and_place",
        ("object", "from", "to"),
        (
            "pick up the {object}[ from the {from=surface}] and put it on the {to=surface}",
            "(take|grab) the {object}[ from the {from=surface}] and (put|place) it on the {to=surface}",
            "(put|place) the {object} on the {to=surface}",
            "move the {object} from the {from=surface} to the {to=surface}",
            "(bring|carry) the {object} to the {to=surface}",
            "the {object} on the {from=surface} goes to the {to=surface}",
            "take the {object} off the {from=surface} and put it on the {to=surface}",
        ),
        (
            "(bring|carry) the {object} from the {from=surface} to the {to=surface}",
            "pick up the {object} and place it on the {to=surface}",
        ),
    ),
    Function(
        "patrol",
        ("points", "rounds"),
        (
            "patrol {points}[ {rounds} times]",
            "(start|run) a patrol of {points}[ with {rounds} rounds]",
            "(watch|check|guard) {points} on your patrol",
            "do {rounds} rounds (of|past) {points}",
            "go on patrol to {points}",
            "patrol[ {rounds} rounds] between {points}",
        ),
        (
            "(do|run) a patrol of {points}[ {rounds} times]",
            "go on patrol between {points}",
        ),
    ),
    Function(
        "set_speed",
        ("percent",),
        (
            "set (your|the) speed to {percent} percent",
            "(drive|go|move) at {percent} percent speed",
            "(slow down|speed up) to {percent} percent",
            "limit your speed to {percent} percent",
            "speed {percent} percent",
            "no faster than {percent} percent",
        ),
        ("(slow down|speed up) to {percent} percent speed",),
    ),
    Function(
        "search_web",
        ("query",),
        (
            "(search|look) for {query} (online|on the web)",
            "(look up|google) {query}",
            "search the web for {query}",
            "find out {query}",
            "what does the internet say about {query}",
            "do a web search for {query}",
        ),
        (
            "search online for {query}",
            "look up {query} on the web",
        ),
    ),
)
