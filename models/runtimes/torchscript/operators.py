"""The allow-list: what TorchScript's code may call.

Operators of ``torch.`` (ATen) compute on tensors, numbers and lists of them, and on nothing outside
the process: no files, no other memory, no threads, no state that outlives a call. An operator's
name stands for all of its overloads. Who needs another one adds it here, after reading what it
does.
"""


def _names(text: str) -> list[str]:
    return text.split()


# Elementwise; a name may also be called with a trailing underscore, in place.
ELEMENTWISE = _names(
    """
    abs add addcdiv addcmul atan2 bitwise_and bitwise_not bitwise_or ceil celu clamp clamp_max
    clamp_min clip cos div elu eq erf exp expm1 fill floor floor_divide fmod ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh le leaky_relu log log10 log1p log2 log_sigmoid logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul multiply nan_to_num
    ne neg pow prelu reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin
    softplus softshrink sqrt square sub subtract tan tanh threshold true_divide trunc where zero
    """
)
LAYERS = _names(
    """
    _convolution conv1d conv2d conv_transpose2d convolution linear batch_norm instance_norm
    group_norm layer_norm rms_norm native_layer_norm local_response_norm adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d avg_pool2d max_pool1d max_pool2d lp_pool2d
    dropout feature_dropout alpha_dropout softmax log_softmax glu addmm baddbmm bmm matmul mm
    einsum bilinear embedding scaled_dot_product_attention _native_multi_head_attention
    pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest2d upsample_bilinear2d
    upsample_bicubic2d pad constant_pad_nd reflection_pad2d replication_pad2d one_hot
    """
)
REDUCTIONS = _names(
    """
    all any amax amin argmax argmin cumsum linalg_norm linalg_vector_norm logsumexp max mean
    median min norm prod std sum topk var var_mean sort
    """
)
SHAPES = _names(
    """
    alias broadcast_tensors broadcast_to cat chunk clone concat contiguous copy detach diagonal
    dim expand expand_as flatten flip floordiv gather index index_select is_floating_point
    masked_select meshgrid movedim moveaxis narrow numel permute repeat repeat_interleave reshape
    reshape_as roll select size slice split split_with_sizes squeeze stack swapaxes swapdims t
    tensor_split tile to transpose tril triu type_as unbind unflatten unfold unsqueeze view
    view_as
    """
)
# New tensors whose every element is written.
NEW = _names(
    """
    arange eye full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor
    tensor zeros zeros_like
    """
)
# Numbers, texts and lists of the language itself.
LANGUAGE = _names(
    """
    Bool Float Int ScalarImplicit FloatImplicit IntImplicit __and__ __contains__ __derive_index
    __getitem__ __is__ __isnot__ __not__ __or__ __range_length _set_item append copy extend format
    insert item len list percentFormat is_autocast_enabled is_grad_enabled warn
    """
)
# In code of modules that were scripted in full: never run by a network that answers. They may not
# be left once the network is frozen.
TRAINING = ["bernoulli_", "empty", "rand", "rand_like", "device"]
# In place, but no elementwise function.
IN_PLACE = ["copy_", "dropout_", "feature_dropout_", "alpha_dropout_", "unsqueeze_", "squeeze_"]

FROZEN = frozenset(
    [
        *(*ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE), *LAYERS, *REDUCTIONS),
        *(*SHAPES, *NEW, *LANGUAGE, *IN_PLACE),
    ]
)
OPERATORS = FROZEN | frozenset(TRAINING)
# ops.prim.NAME: facts of a tensor, errors.
PRIMITIVES = frozenset(
    _names(
        """
        NumToTensor RaiseException abs device dtype is_nested layout max min requires_grad shape
        type unchecked_cast
        """
    )
)
# Names of the language that are called without a place.
BUILTINS = frozenset(
    ["annotate", "uninitialized", "unchecked_cast", "int", "float", "bool", "range"]
)
# Operators that a module in training mode still has once it is frozen.
RANDOM = frozenset(["dropout", "dropout_", "feature_dropout", "feature_dropout_"])
