"""The gRPC interface: parses ``Ensemble.Classify`` messages and renders the reply."""

import asyncio
import logging
from typing import TYPE_CHECKING

from ray.serve.grpc_util import RayServegRPCContext

from app.errors import OverloadedError
from app.graph.parameters import UNEXPECTED
from app.graph.request import ClassifyRequest
from app.graph.timeline import Timeline
from app.grpc import tandem_pb2 as messages
from app.grpc.call import Call
from app.grpc.reply import reply_of
from app.grpc.request import images_of, timeout_s_of, top_k_of
from app.messages import Fault
from app.metrics.requests import CLIENT_WENT, timed
from app.queueing.priority import lane_of
from models.errors import TandemError

if TYPE_CHECKING:
    from app.deployments.gateway import Gateway

logger = logging.getLogger("ray.serve")
SERVICE = messages.DESCRIPTOR.services_by_name["Ensemble"].full_name


async def answer_classify(
    gateway: "Gateway", request: messages.ClassifyRequest, context: RayServegRPCContext
) -> messages.ClassifyReply:
    """Answer one call; an error is the context's status, and the reply is empty."""
    call = Call(SERVICE, "Classify", context)
    try:
        return await _classify(gateway, request, call)
    except OverloadedError as error:
        call.refuse(Fault.of(error), error.retry_after_s)
    except TandemError as error:
        call.refuse(Fault.of(error))
    except asyncio.CancelledError:  # the client hung up, or its deadline is over
        call.status = CLIENT_WENT
        raise
    except Exception:
        logger.exception("request %s failed", call.request_id)
        call.refuse(UNEXPECTED)
    finally:
        call.ended()
    return messages.ClassifyReply()


async def _classify(
    gateway: "Gateway", request: messages.ClassifyRequest, call: Call
) -> messages.ClassifyReply:
    timeline, settings = Timeline(), gateway.settings
    gateway.keys.check(call.authorization)
    top_k = top_k_of(request, settings.default_top_k, gateway.num_classes)
    most_s = min(settings.request_timeout_s, gateway.answer_timeout_s)  # the message is there
    timeout_s = timeout_s_of(call.metadata, most_s)
    with gateway.admission.admit(timeout_s), gateway.byte_budget.share() as share:
        with timeline.measure("read") as timeline.reading:
            images = images_of(request, settings)
            share.grow(sum(map(len, images)))
        lane = lane_of(call.metadata.get("priority"), len(images))
        results = await gateway.classify(
            ClassifyRequest(images, top_k, timeout_s, call.request_id, timeline, lane)
        )
    with timed("encode"), timeline.measure("encode"):
        return reply_of(results, call.request_id)
