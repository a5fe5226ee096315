"""The one error tree. Every service raises from here; the edges translate it to gRPC and HTTP.

    InfiniteLLMError
    |- ClientError                     the caller must change something
    |  |- InvalidRequest               400  INVALID_ARGUMENT     invalid_request_error
    |  |- ContextLengthExceeded        400  OUT_OF_RANGE         context_length_exceeded
    |  |- Aborted                      499  CANCELLED            aborted
    |  |- Unauthenticated              401  UNAUTHENTICATED      invalid_api_key
    |  `- ModelNotFound                404  NOT_FOUND            model_not_found
    |- ServerError                     the service's fault
    |  |- Overloaded                   429  RESOURCE_EXHAUSTED   overloaded          retry
    |  |  `- RateLimited               429  RESOURCE_EXHAUSTED   rate_limit_exceeded retry
    |  |- Unavailable                  503  UNAVAILABLE          unavailable         retry
    |  |- NotLeader                    503  UNAVAILABLE          not_leader          retry elsewhere
    |  |- InstanceLost                 502  ABORTED              instance_lost       retry
    |  |- DeadlineExceeded             504  DEADLINE_EXCEEDED    deadline_exceeded   retry
    |  `- InternalError                500  INTERNAL             internal_error
    |- PartLost                        inside a worker: a creditor no longer holds what was lent
    `- ConfigError                     a setting is wrong; the process exits with 2

gRPC codes are kept by name so that pure modules never import grpc.
"""

from typing import ClassVar

from services.common.ids import Incarnation, InstId


class InfiniteLLMError(Exception):
    """Base of all errors of the system.

    `code` travels on the wire and names the class again on the other side; `param` is the request
    field at fault, where there is one.
    """

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "internal_error"
    openai_type: ClassVar[str] = "server_error"
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(InfiniteLLMError):
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    code = "invalid_request"
    openai_type = "invalid_request_error"


class InvalidRequest(ClientError):
    pass


class ContextLengthExceeded(ClientError):
    grpc_code = "OUT_OF_RANGE"
    code = "context_length_exceeded"


class Aborted(ClientError):
    """By another call of the same client."""

    http_status = 499
    grpc_code = "CANCELLED"
    code = "aborted"


class Unauthenticated(ClientError):
    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    code = "invalid_api_key"


class ModelNotFound(ClientError):
    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "model_not_found"


class ServerError(InfiniteLLMError):
    pass


class InternalError(ServerError):
    pass


class Overloaded(ServerError):
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "overloaded"
    openai_type = "rate_limit_error"
    is_retryable = True

    def __init__(self, message: str, param: str | None = None, retry_after_s: float = 1.0) -> None:
        """`retry_after_s`: not told to other processes, which know how long their own queue is."""
        super().__init__(message, param)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """By this client: it has used what its key allows."""

    code = "rate_limit_exceeded"


class Unavailable(ServerError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "unavailable"
    is_retryable = True


class NotLeader(ServerError):
    """Another gManager leads; the message names its address, where it is known."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "not_leader"
    is_retryable = True


class InstanceLost(ServerError):
    http_status = 502
    grpc_code = "ABORTED"
    code = "instance_lost"
    is_retryable = True


class DeadlineExceeded(ServerError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"
    is_retryable = True


class PartLost(InfiniteLLMError):
    """A creditor does not hold (any more) what the owner's block table says it lends."""

    code = "part_lost"

    def __init__(
        self, inst_id: InstId, message: str, incarnation: Incarnation | None = None
    ) -> None:
        """`incarnation`: which of the instance's starts does not, where that is known."""
        super().__init__(f"instance {inst_id}: {message}")
        self.inst_id = inst_id
        self.incarnation = incarnation


class ConfigError(InfiniteLLMError):
    code = "config"


#: Every error that may cross a process border, by its wire code.
BY_CODE: dict[str, type[InfiniteLLMError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        ContextLengthExceeded,
        Aborted,
        Unauthenticated,
        ModelNotFound,
        InternalError,
        Overloaded,
        RateLimited,
        Unavailable,
        NotLeader,
        InstanceLost,
        DeadlineExceeded,
    )
}
