"""Records of conversations, as they lie in Redis."""

from __future__ import annotations

from foveate.store.frame import Kind, pack, unpack
from foveate.v1 import answers_pb2, records_pb2
from gateway.registry.base import Conversation, ConversationTurn
from gateway.values import Role, Turn


def write_conversation(conversation: Conversation) -> bytes:
    """Returns the framed record."""
    turns = [
        records_pb2.ConversationTurn(
            question=_turn_to_proto(turn.question),
            answer=_turn_to_proto(turn.answer),
            answer_token_ids=turn.answer_token_ids,
        )
        for turn in conversation.turns
    ]
    record = records_pb2.ConversationRecord(
        conversation_id=conversation.conversation_id,
        tenant=conversation.tenant,
        context=conversation.context,
        turns=turns,
        version=conversation.version,
    )
    return pack(Kind.CONVERSATION, record)


def read_conversation(data: bytes) -> Conversation:
    """Returns the conversation of a record. Raises Corrupt when it is not a whole, undamaged one."""
    record = unpack(Kind.CONVERSATION, data, records_pb2.ConversationRecord)
    turns = tuple(
        ConversationTurn(
            Turn(Role.USER, turn.question.text), Turn(Role.ASSISTANT, turn.answer.text), tuple(turn.answer_token_ids)
        )
        for turn in record.turns
    )
    return Conversation(record.conversation_id, record.tenant, record.context, turns, record.version)


def _turn_to_proto(turn: Turn) -> answers_pb2.Turn:
    return answers_pb2.Turn(role=answers_pb2.Role.ValueType(turn.role), text=turn.text)
