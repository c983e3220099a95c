"""Every name that leaves a process. The semantic conventions still move; this is the one place that follows them.

Generic names are those of OpenTelemetry's RPC and GenAI conventions (semconv 1.45); ours start with `foveate.`.
Lengths and times of drafting mean what `gateway.rounds` says.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "foveate"

# Spans. A call's own span carries its method's name.
SPAN_ANSWER: Final = "answer"
SPAN_CONTEXT_RESOLVE: Final = "context.resolve"
SPAN_ENCODE: Final = "encode"
SPAN_PREFILL: Final = "prefill"
SPAN_ATTACH: Final = "draft.attach"
SPAN_DRAFT: Final = "draft"
SPAN_VERIFY: Final = "verify"
SPAN_POLICY: Final = "policy"
SPAN_DETOKENIZE: Final = "detokenize"

RPC_SYSTEM: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_STATUS: Final = "rpc.response.status_code"
RPC_STATUS_NUMBER: Final = "rpc.grpc.status_code"
ERROR_TYPE: Final = "error.type"
THREAD_NAME: Final = "thread.name"

GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_SEED: Final = "gen_ai.request.seed"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_TOKEN_TYPE: Final = "gen_ai.token.type"
OPERATION_CHAT: Final = "chat"
PROVIDER: Final = "foveate"

CONTEXT: Final = "foveate.context"
TIER: Final = "foveate.context.tier"
DRAFT_MODE: Final = "foveate.draft.mode"
DRAFT_LENGTH: Final = "foveate.draft.length"
ROUND: Final = "foveate.round"
NUM_ROUNDS: Final = "foveate.rounds"
NUM_DRAFT_TOKENS: Final = "foveate.draft.tokens"
NUM_ACCEPTED_TOKENS: Final = "foveate.accepted.tokens"
NUM_LOOSE_TOKENS: Final = "foveate.loose.tokens"
RELEVANCE_MAX: Final = "foveate.relevance.max"
RELEVANCE_MEAN: Final = "foveate.relevance.mean"
POLICY: Final = "foveate.policy"
GUARANTEE: Final = "foveate.guarantee"
NUM_TOKENS: Final = "foveate.tokens"
NUM_FRAMES: Final = "foveate.frames"
MODEL_US: Final = "foveate.model_us"
QUEUED_US: Final = "foveate.device.queued_us"
NOTES: Final = "foveate.notes"
POSITION: Final = "foveate.draft.position"
REASON: Final = "foveate.reason"
TRANSPORT: Final = "foveate.kv.transport"
OWNER: Final = "foveate.kv.owner"
TENANT: Final = "foveate.tenant"
EVENT: Final = "foveate.event"
PEER: Final = "foveate.peer"

# Metrics.
METRIC_TTFT: Final = "gen_ai.server.time_to_first_token"
METRIC_TPOT: Final = "gen_ai.server.time_per_output_token"
METRIC_DURATION: Final = "gen_ai.server.request.duration"
METRIC_TOKENS: Final = "gen_ai.client.token.usage"
METRIC_ANSWERS: Final = "foveate.answers"
METRIC_ANSWERS_ACTIVE: Final = "foveate.answers.active"
METRIC_QUEUE: Final = "foveate.requests.waiting"
METRIC_REFUSED: Final = "foveate.requests.refused"
METRIC_DRAFTS: Final = "foveate.drafts"
METRIC_DRAFT_TOKENS: Final = "foveate.draft.tokens"
METRIC_ACCEPTED_TOKENS: Final = "foveate.accepted.tokens"
METRIC_ACCEPTED_PER_POS: Final = "foveate.accepted.tokens_per_position"
METRIC_LOOSE_TOKENS: Final = "foveate.loose.tokens"
METRIC_ACCEPTANCE_LENGTH: Final = "foveate.acceptance.length"
METRIC_ROUND_OVERHEAD: Final = "foveate.round.overhead"
METRIC_PEERS_READY: Final = "foveate.peers.ready"
METRIC_TRANSPORT: Final = "foveate.kv.transport.info"
METRIC_SEQUENCES: Final = "foveate.sequences.open"
METRIC_POOL_BYTES: Final = "foveate.kv.pool.size"
METRIC_POOL_USED: Final = "foveate.kv.pool.used"
METRIC_COLD_BYTES: Final = "foveate.kv.cold.used"
METRIC_CONTEXTS: Final = "foveate.contexts.held"
METRIC_CONTEXTS_RESOLVED: Final = "foveate.contexts.resolved"
METRIC_CONTEXT_EVENTS: Final = "foveate.context.events"
METRIC_REGISTRY_EVENTS: Final = "foveate.registry.events"
METRIC_BREAKER: Final = "foveate.redis.breaker_open"
METRIC_DEVICE_QUEUE: Final = "foveate.device.queue_depth"
METRIC_DEVICE_STEPS: Final = "foveate.device.steps"
METRIC_DEVICE_BLOCKS: Final = "foveate.device.blocks"  # by steps: the batch size
METRIC_ATTACHED_POOLS: Final = "foveate.kv.pools.attached"
METRIC_DECODER_FAILURES: Final = "foveate.media.decoder_failures"

# Upper bounds of histogram buckets. Rounds of a fast model take less than 10 ms, where the conventions' own are blind.
LATENCY_BOUNDS_S: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TOKEN_BOUNDS: Final = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
LENGTH_BOUNDS: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0)
