"""The routes by which a fleet sees a server and gives it weights (`ductile.messages.updates`).

| route | what it is |
|---|---|
| GET /fleet/state | `ServerState` |
| POST /weights/prepare, /weights/verify, /weights/commit, /weights/abort | a `WeightUpdate`, step by step |
| POST /weights/buckets/{update_id}/{sender}/{index} | a bucket's bytes (`X-Ductile-Epoch`, `X-Ductile-Checksum`) |
| POST /weights/lease, GET /weights/buckets/{lease}/{index} | this server's version, for another one that joins |
| POST /weights/lease/end | it has it |
| GET /weights/digest | `LiveDigest`: read from what is sampled from |
| POST /pause, /resume | the gate before the engine, for all clients; both reply `ServerState` |

Refusals: 401 without the control token; 409 for what is over or too early; 422 for what does not fit this model.
"""

from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from ductile.generator.server.fleet_control import FleetControl
from ductile.generator.server.request_body import BadBody
from ductile.generator.server.update_machine import Fenced, Unusable
from ductile.messages.updates import EndUpdate, EndVersionLease, LeaseVersion, PauseServer, PrepareUpdate, ResumeServer
from ductile.transport.http_server.openai_error import error
from ductile.weights.carriers.carrier import checksum_of

M = TypeVar("M", bound=msgspec.Struct)

fleet_routes = APIRouter()


async def _control(http: Request) -> FleetControl:
    return http.app.state.service.control


OwnControl = Annotated[FleetControl, Depends(_control)]


@fleet_routes.get("/fleet/state")
async def state(control: OwnControl) -> Response:
    return _json(control.tell_state())


@fleet_routes.post("/weights/prepare")
async def prepare(control: OwnControl, http: Request) -> Response:
    return _json(await control.receiver.prepare(_read(PrepareUpdate, http)))


@fleet_routes.post("/weights/buckets/{update_id}/{sender}/{index}")
async def take_bucket(update_id: str, sender: str, index: int, control: OwnControl, http: Request) -> Response:
    try:
        epoch = int(http.headers["X-Ductile-Epoch"])
    except (KeyError, ValueError):
        raise BadBody("the header X-Ductile-Epoch must have the update's epoch") from None
    content, checksum = http.scope["state"].pop("body"), http.headers.get("X-Ductile-Checksum", "")
    return _json(await control.receiver.take(update_id, epoch, sender, index, checksum, content))


@fleet_routes.post("/weights/verify")
async def verify(control: OwnControl, http: Request) -> Response:
    return _json(await control.receiver.verify(_read(EndUpdate, http)))


@fleet_routes.post("/weights/commit")
async def commit(control: OwnControl, http: Request) -> Response:
    return _json(await control.receiver.commit(_read(EndUpdate, http)))


@fleet_routes.post("/weights/abort")
async def abort(control: OwnControl, http: Request) -> Response:
    return _json(await control.receiver.abort(_read(EndUpdate, http)))


@fleet_routes.post("/weights/lease")
async def lease(control: OwnControl, http: Request) -> Response:
    url = str(http.base_url).rstrip("/")
    return _json(await control.donor.lease(_read(LeaseVersion, http), control.incarnation, url))


@fleet_routes.post("/weights/lease/end")
async def end_lease(control: OwnControl, http: Request) -> Response:
    control.donor.end(_read(EndVersionLease, http).location)
    return Response(b"{}", media_type="application/json")


@fleet_routes.get("/weights/buckets/{lease}/{index}")
async def give_bucket(lease: str, index: int, control: OwnControl) -> Response:
    content = await control.donor.bucket(lease, index)
    checksum = {"X-Ductile-Checksum": checksum_of(content)}
    return Response(content.numpy().tobytes(), media_type="application/octet-stream", headers=checksum)


@fleet_routes.get("/weights/digest")
async def live_digest(control: OwnControl) -> Response:
    return _json(await control.live_digest())


@fleet_routes.post("/pause")
async def pause(control: OwnControl, http: Request) -> Response:
    return _json(await control.pause(_read(PauseServer, http)))


@fleet_routes.post("/resume")
async def resume(control: OwnControl, http: Request) -> Response:
    return _json(control.resume(_read(ResumeServer, http)))


def _read(kind: type[M], http: Request) -> M:
    try:
        return msgspec.json.decode(http.scope["state"].pop("body") or b"{}", type=kind)
    except msgspec.DecodeError as problem:
        raise BadBody(f"the body is no {kind.__name__}: {problem}") from None


def _json(said: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(said), media_type="application/json")


def translate_fleet_errors(app: FastAPI) -> None:
    """Have refusals said in OpenAI's form."""

    @app.exception_handler(Fenced)
    async def _(http: Request, problem: Fenced) -> JSONResponse:
        return JSONResponse(error(str(problem), code="fenced"), 409)

    @app.exception_handler(Unusable)
    async def _(http: Request, problem: Unusable) -> JSONResponse:
        return JSONResponse(error(str(problem), code="unusable"), 422)
