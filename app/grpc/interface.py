"""The gRPC interface: parses ``Ensemble.Classify`` messages and renders the reply."""

import asyncio
import logging

from ray.serve.grpc_util import RayServegRPCContext

from app.errors import OverloadedError
from app.graph.intake import RequestOptions
from app.graph.service import EnsembleService
from app.graph.timeline import Timeline
from app.grpc import tandem_pb2 as messages
from app.grpc.call import Call
from app.grpc.reply import reply_of
from app.grpc.request import images_of, timeout_s_of
from app.messages import UNEXPECTED, Fault
from app.metrics.requests import CLIENT_WENT
from app.queueing.byte_budget import Share
from models.errors import TandemError

logger = logging.getLogger("ray.serve")
SERVICE = messages.DESCRIPTOR.services_by_name["Ensemble"].full_name


async def answer_classify(
    service: EnsembleService, request: messages.ClassifyRequest, context: RayServegRPCContext
) -> messages.ClassifyReply:
    """Answer one call; an error is the context's status, and the reply is empty."""
    call = Call(SERVICE, "Classify", context)
    try:
        return await _classify(service, request, call)
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
    service: EnsembleService, request: messages.ClassifyRequest, call: Call
) -> messages.ClassifyReply:
    timeline = Timeline()
    service.keys.check(call.authorization)
    options = RequestOptions(
        call.request_id,
        request.top_k if request.HasField("top_k") else None,
        timeout_s_of(call.metadata),
        call.metadata.get("priority"),
    )

    async def read(share: Share) -> list[bytes]:
        images = images_of(request, service.settings)
        share.grow(sum(map(len, images)))
        return images

    answers = await service.answer(read, options, timeline)
    with timeline.encoding():
        return reply_of(answers, call.request_id)
