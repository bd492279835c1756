"""More templates for the demo's commands, for training only.

Held-out commands do not use the templates in this file. If you add templates to this file, the
held-out commands therefore stay the same.
"""

from __future__ import annotations

PARAPHRASES: dict[str, tuple[str, ...]] = {
    "set_light": (
        "make the (light|lights) in the {room} {color}",
        "(put|bring) the (light|lights|lamp) in the {room} (to|at) {brightness=percent} percent",
        "the (light|lights|lamp) in the {room} (should be|must be) {state=on_off}",
        "(put|leave) the (light|lights|lamp) in the {room} {state=on_off}",
        "{brightness=percent} percent (light|brightness) in the {room}",
        "(dim|set) the {room} lamp to {brightness=percent} percent",
    ),
    "set_thermostat": (
        "set the {room} thermostat to {temperature}[ degrees]",
        "(turn|put) the {room} heating to {temperature}[ degrees]",
        "the {room} should be {temperature} degrees",
        "(heating|thermostat) in the {room} to {temperature}[ degrees]",
    ),
    "set_blinds": (
        "(blinds|shutters|curtains) in the {room} to {position=percent} percent",
        "the {room} (blinds|shutters|curtains) {position=up_down}",
        "move the {room} (blinds|shutters|curtains) {position=up_down}",
    ),
    "set_timer": (
        "set a {duration=amount} {unit} timer[ called {label}]",
        "i want a timer for {duration=amount} {unit}[ for {label}]",
        "start a timer called {label} for {duration=amount} {unit}",
        "run a timer for {duration=amount} {unit}",
    ),
    "add_reminder": (
        "remind me at {time} {day} that i have to {text=task}",
        "{day} at {time} remind me to {text=task}",
        "don't forget to remind me to {text=task}[ at {time}][ {day}]",
        "(set|add) a reminder at {time}[ {day}] to {text=task}",
    ),
    "add_to_list": (
        "add to (my|the|our) {list} list {items}",
        "to (my|the|our) {list} list i want to add {items}",
        "write {items} on (my|our) {list} list",
        "note {items} on (my|the) list",
        "for (my|the) {list} list (get|add) {items}",
    ),
    "play_music": (
        "start {query=music} on the speaker in the {room}",
        "put on {query=music} on the {room} speaker",
        "play {query=music} through the {room} speaker",
        "i (need|have) to hear {query=music}[ in the {room}]",
        "i feel like listening to {query=music}[ in the {room}]",
    ),
    "clean_rooms": (
        "it's time the robot cleans {rooms}",
        "clean up {rooms}",
        "(tell|ask) the robot to {mode=clean_mode} {rooms}",
        "have {rooms} cleaned",
    ),
    "lock_door": (
        "(leave|make) the {door} door {locked}",
        "the door called {door} (should be|must be) {locked}",
        "i want the door called {door} {locked}",
        "(check|make sure) the door called {door} is {locked}",
    ),
    "navigate": (
        "take (us|me) to {destination=place}[ avoiding {avoid}]",
        "i (need|have|want) to (drive|travel) to {destination=place}[ avoiding {avoid}]",
        "bring (us|me) to {destination=place}[ with a stop at {stops}]",
        "we are going to {destination=place}[ avoiding {avoid}]",
    ),
    "set_climate": (
        "(turn|put) the (car|cabin) to {temperature}[ degrees][ with the fan at {fan}]",
        "put the air conditioning on {temperature}[ degrees]",
        "(put|turn) the fan on the {zone=seat} side to level {fan}",
        "the fan on the {zone=seat} side to {fan}",
    ),
    "set_window": (
        "the window on the {window=seat} side to {position=percent} percent",
        "(put|bring) the window on the {window=seat} side to {position=percent} percent",
        "roll the window on the {window=seat} side {position=up_down}",
        "(lower|open) the window on the {window=seat} side to {position=percent} percent",
    ),
    "heat_seat": (
        "(turn on|start) the heating of the {seat} seat[ at level {level}]",
        "the {seat} seat (heating|heater) (to|at) level {level}",
        "put the {seat} seat (heating|heater) at level {level}",
    ),
    "call_contact": (
        "i (want|need|have) to (phone|dial) {contact}",
        "dial {contact} on the {phone} number",
        "i (want|need) to (talk|speak) to {contact} on the {phone} (phone|number)",
        "(phone|reach) {contact} on (his|her|the) {phone} (phone|number)",
        "get the {phone} number of {contact} on the line",
        "can i (call|ring) {contact}",
    ),
    "send_message": (
        "(text|message) {contact}, saying {text=message}",
        "send {contact} a (message|text) that says {text=message}",
        "write a (message|text) to {contact} that says {text=message}",
        "send a note to {contact} saying {text=message}",
        "(write|note) {contact} saying {text=message}",
    ),
    "move": (
        "robot, (move|go) {direction} {distance=metres}",
        "robot, {distance=metres} {direction}",
        "robot (roll|drive|move) {distance=metres} {direction}",
    ),
    "turn": (
        "(rotate|spin) to the {direction=side} by {degrees=angle} degrees",
        "turn {direction=side} by {degrees=angle} degrees",
    ),
    "pick_and_place": (
        "(take|move) the {object} from the {from=surface} and put it on the {to=surface}",
        "(get|bring) the {object} off the {from=surface} and place it on the {to=surface}",
        "from the {from=surface} (bring|carry|move) the {object} to the {to=surface}",
        "grab the {object} and (put|place) it on the {to=surface}",
        "(lift|pick up) the {object} from the {from=surface} and place it on the {to=surface}",
    ),
    "patrol": (
        "(start|make) a patrol of {points}[ {rounds} times]",
        "go on patrol (past|around) {points}",
        "do a patrol between {points}",
        "run {rounds} rounds (of|past) {points}",
    ),
    "set_speed": (
        "(slow down|speed up) to a speed of {percent} percent",
        "{percent} percent speed",
        "go to {percent} percent speed",
    ),
    "search_web": (
        "look for {query} on the internet",
        "search for {query} with google",
        "go online and look up {query}",
        "(look up|find) {query} online",
        "find {query} on the web",
    ),
}
