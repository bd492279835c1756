"""The calls that the first two demos write, as Pydantic models.

The first demo writes one ``Call``. It does not use the last four functions of this file. The second
demo writes ``Calls``, which is a list:

    out = dlm_runtime.open("build/several").generate(prompt=command, schema=Calls)
    for call in Calls.model_validate_json(out.text).root:
        print(call.name, call.arguments)

Arguments have the order of the training data. An argument that the command does not mention is left
out of the JSON. Its field in the model is then None.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

Text = Annotated[str, Field(min_length=1)]
"""Words of the command. In the second demo, ``$n`` means the result of call number ``n``. The first
call has number 1."""
Texts = Annotated[list[Text], Field(min_length=1)]
Room = Literal[
    "kitchen",
    "bedroom",
    "bathroom",
    "living room",
    "hallway",
    "office",
    "garage",
    "basement",
    "attic",
    "dining room",
    "nursery",
    "study",
    "guest room",
    "laundry room",
    "porch",
    "library",
    "playroom",
    "pantry",
]
Seat = Literal["driver", "passenger", "rear left", "rear right"]
Percent = Annotated[int, Field(ge=0, le=100)]
Degrees = Annotated[float, Field(ge=15, lt=30)]
Time = Annotated[
    str, Field(pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9]|\$[1-6]([+-][1-9][0-9]{0,2})?)$")
]
"""A time of day, as ``HH:MM``. In the second demo, a time can also be relative to an earlier call:
``$2`` is the time of call number 2, and ``$2+10`` is ten minutes later.
"""
Day = Annotated[
    str,
    Field(
        pattern=r"^(today|tomorrow|(next )?(monday|tuesday|wednesday|thursday|friday|saturday|sunday))$"
    ),
]


class Strict(BaseModel):
    """The base class of arguments and calls: JSON objects without other keys."""

    model_config = ConfigDict(extra="forbid", serialize_by_alias=True)


class SetLight(Strict):
    """Switch, dim or colour the lights of a room."""

    class Arguments(Strict):
        room: Room
        state: Literal["on", "off"] | None = None
        brightness: Percent | None = None
        color: (
            Literal[
                "red",
                "green",
                "blue",
                "yellow",
                "orange",
                "purple",
                "pink",
                "white",
                "warm white",
                "turquoise",
            ]
            | None
        ) = None

    name: Literal["set_light"]
    arguments: Arguments


class SetThermostat(Strict):
    """Set the heating, in degrees Celsius."""

    class Arguments(Strict):
        temperature: Degrees
        room: Room | None = None

    name: Literal["set_thermostat"]
    arguments: Arguments


class SetBlinds(Strict):
    """Move blinds. Position 100 is open."""

    class Arguments(Strict):
        room: Room
        position: Percent

    name: Literal["set_blinds"]
    arguments: Arguments


class SetTimer(Strict):
    """Start a timer."""

    class Arguments(Strict):
        duration: Annotated[int, Field(ge=1, le=59)]
        unit: Literal["seconds", "minutes", "hours"]
        label: Text | None = None

    name: Literal["set_timer"]
    arguments: Arguments


class AddReminder(Strict):
    """Remind the user of something."""

    class Arguments(Strict):
        text: Text
        time: Time | None = None
        day: Day | None = None

    name: Literal["add_reminder"]
    arguments: Arguments


class AddToList(Strict):
    """Write items on a list."""

    class Arguments(Strict):
        items: Texts
        list: (
            Literal[
                "shopping", "packing", "grocery", "party", "to do", "camping", "gift", "hardware"
            ]
            | None
        ) = None

    name: Literal["add_to_list"]
    arguments: Arguments


class PlayMusic(Strict):
    """Play something."""

    class Arguments(Strict):
        query: Text
        room: Room | None = None

    name: Literal["play_music"]
    arguments: Arguments


class CleanRooms(Strict):
    """Send the vacuum robot."""

    class Arguments(Strict):
        rooms: Annotated[list[Room], Field(min_length=1)]
        mode: Literal["vacuum", "mop", "dust"] | None = None

    name: Literal["clean_rooms"]
    arguments: Arguments


class LockDoor(Strict):
    """Lock or unlock a door."""

    class Arguments(Strict):
        door: Literal["front", "back", "garage", "patio", "side", "cellar", "balcony", "garden"]
        locked: bool

    name: Literal["lock_door"]
    arguments: Arguments


class Navigate(Strict):
    """Drive somewhere."""

    class Arguments(Strict):
        destination: Text
        stops: Texts | None = None
        avoid: Literal["tolls", "motorways", "ferries"] | None = None

    name: Literal["navigate"]
    arguments: Arguments


class SetClimate(Strict):
    """Set the air conditioning of the car."""

    class Arguments(Strict):
        temperature: Degrees | None = None
        fan: Annotated[int, Field(ge=1, le=7)] | None = None
        zone: Seat | None = None

    name: Literal["set_climate"]
    arguments: Arguments


class SetWindow(Strict):
    """Move a window of the car. Position 100 is open."""

    class Arguments(Strict):
        window: Seat
        position: Percent

    name: Literal["set_window"]
    arguments: Arguments


class HeatSeat(Strict):
    """Heat a seat of the car."""

    class Arguments(Strict):
        seat: Seat
        level: Annotated[int, Field(ge=1, le=5)] | None = None

    name: Literal["heat_seat"]
    arguments: Arguments


class CallContact(Strict):
    """Call somebody."""

    class Arguments(Strict):
        contact: Text
        phone: Literal["mobile", "home", "work"] | None = None

    name: Literal["call_contact"]
    arguments: Arguments


class SendMessage(Strict):
    """Send a message to somebody."""

    class Arguments(Strict):
        contact: Text
        text: Text

    name: Literal["send_message"]
    arguments: Arguments


class Move(Strict):
    """Drive the robot a distance in metres."""

    class Arguments(Strict):
        direction: Literal["forward", "backward", "left", "right"]
        distance: Annotated[float, Field(ge=1, lt=21)] | None = None

    name: Literal["move"]
    arguments: Arguments


class Turn(Strict):
    """Turn the robot."""

    class Arguments(Strict):
        direction: Literal["left", "right"]
        degrees: Annotated[int, Field(ge=1, le=360)] | None = None

    name: Literal["turn"]
    arguments: Arguments


class PickAndPlace(Strict):
    """Carry an object."""

    class Arguments(Strict):
        object: Text
        from_: Annotated[Text | None, Field(alias="from")] = None
        to: Text

    name: Literal["pick_and_place"]
    arguments: Arguments


class Patrol(Strict):
    """Patrol between points."""

    class Arguments(Strict):
        points: Texts
        rounds: Annotated[int, Field(ge=2, le=12)] | None = None

    name: Literal["patrol"]
    arguments: Arguments


class SetSpeed(Strict):
    """Set the robot's speed."""

    class Arguments(Strict):
        percent: Percent

    name: Literal["set_speed"]
    arguments: Arguments


class SearchWeb(Strict):
    """Search the web. Later calls can use the result."""

    class Arguments(Strict):
        query: Text

    name: Literal["search_web"]
    arguments: Arguments


class SetAlarm(Strict):
    """Set an alarm. Only the second demo writes this call and the next ones."""

    class Arguments(Strict):
        time: Time
        day: Day | None = None

    name: Literal["set_alarm"]
    arguments: Arguments


class StartAppliance(Strict):
    """Start an appliance, now or later."""

    class Arguments(Strict):
        appliance: Literal[
            "coffee",
            "kettle",
            "oven",
            "dishwasher",
            "washing machine",
            "dryer",
            "toaster",
            "rice cooker",
            "air purifier",
            "sprinkler",
            "pool pump",
            "humidifier",
        ]
        time: Time | None = None

    name: Literal["start_appliance"]
    arguments: Arguments


class ReadCalendar(Strict):
    """Read an entry of the calendar. Later calls can use the result."""

    class Arguments(Strict):
        entry: Annotated[
            str, Field(pattern=r"^(first|second|next|last) (meeting|appointment|call|lesson)$")
        ]
        day: Day | None = None

    name: Literal["read_calendar"]
    arguments: Arguments


class FindPlace(Strict):
    """Find a shop or the like. Later calls can use the result."""

    class Arguments(Strict):
        query: Text
        near: Text | None = None

    name: Literal["find_place"]
    arguments: Arguments


Call = (
    SetLight
    | SetThermostat
    | SetBlinds
    | SetTimer
    | AddReminder
    | AddToList
    | PlayMusic
    | CleanRooms
    | LockDoor
    | Navigate
    | SetClimate
    | SetWindow
    | HeatSeat
    | CallContact
    | SendMessage
    | Move
    | Turn
    | PickAndPlace
    | Patrol
    | SetSpeed
    | SearchWeb
    | SetAlarm
    | StartAppliance
    | ReadCalendar
    | FindPlace
)
"""One call."""


class Calls(RootModel[Annotated[list[Call], Field(min_length=1)]]):
    """The calls of a command, in order."""
