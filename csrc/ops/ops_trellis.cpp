// The ops of trellises.
#include <torch/csrc/stable/library.h>

#include "ops/backend.h"

namespace hf_kbit {

Code check_code(const std::string& code) {
    if (code == "3inst") return Code::three_inst;
    if (code == "mcg") return Code::mcg;
    if (code == "mul1") return Code::mul1;
    refuse("code", code, "3inst, mcg or mul1");
}

namespace {

void check_range(std::string_view name, int64_t found, int64_t most) {
    if (found < 1 || found > most) refuse(name, std::to_string(found), "1 to " + std::to_string(most));
}

Tensor encode_trellis(const Tensor& targets, int64_t bits, int64_t lead) {
    check_dtype("targets", targets, {ScalarType::Float});
    if (targets.dim() != 2 || targets.size(1) != kTrellisSteps) {
        refuse("targets", "shape " + to_string(shape_of(targets)), "[tiles, 256]");
    }
    check_range("bits", bits, kMostTrellisBits);
    check_range("lead", lead, kMostLead);
    Tensor words = new_tensor(targets, {targets.size(0), 16 * bits}, ScalarType::Short);
    if (words.numel() > 0) {
        backend::encode_trellis(as_contiguous(targets), static_cast<int>(bits), static_cast<int>(lead), words);
    }
    return words;
}

Tensor decode_trellis(const Tensor& trellis, std::string code, ScalarType dtype) {
    check_dtype("trellis", trellis, {ScalarType::Short});
    const Shape shape = shape_of(trellis);
    const int64_t bits = shape.empty() ? 0 : shape.back() / 16;
    if (shape.size() < 3 || shape.back() % 16 != 0 || bits < 1 || bits > kMostTrellisBits) {
        refuse("trellis", "shape " + to_string(shape),
               "[*, in_features / 16, out_features / 16, 16 * bits] of 1 to 8 bits");
    }
    const Code its = check_code(code);
    const Dtype out_dtype = float_dtype("dtype", dtype, false);
    const auto sizes = shape.end() - 3;
    const int64_t across = sizes[0], down = sizes[1];
    Tensor out =
        new_tensor(trellis, concat(Shape(shape.begin(), sizes), {kTrellisTile * down, kTrellisTile * across}), dtype);
    if (out.numel() > 0) {
        backend::decode_trellis(as_contiguous(trellis), its, static_cast<int>(bits), across, down, out, out_dtype);
    }
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, HF_KBIT_DISPATCH_KEY, library) {
    library.impl("encode_trellis", TORCH_BOX(&encode_trellis));
    library.impl("decode_trellis", TORCH_BOX(&decode_trellis));
}

}  // namespace

}  // namespace hf_kbit
