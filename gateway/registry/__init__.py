"""Who holds which context, and conversations: in this process's memory, or in Redis for all gateways."""

from gateway.registry.base import Conversation, ConversationChanged, Registry
from gateway.registry.memory import MemoryRegistry
from gateway.registry.redis import RedisRegistry

__all__ = ["Conversation", "ConversationChanged", "MemoryRegistry", "RedisRegistry", "Registry"]
