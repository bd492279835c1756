// Registers our custom operators in ONNX Runtime. The operators run the kernels. The graph is
// untrusted, so in every pass, the operators check all shapes before they call a kernel.
#include <cstdio>
#include <exception>
#include <memory>

#include "engines/onnxruntime/custom_op.h"

namespace dlm {
namespace ops {
namespace {

const Op& op_of(const ort::CustomOp* entry) { return *reinterpret_cast<const Op*>(entry); }

template <class Body>
OrtStatus* reported(const Op& op, Body body) noexcept {
  const auto report = [&](const char* what) {
    std::array<char, 512> text{};
    std::snprintf(text.data(), text.size(), "%s: %s", op.is.name, what);
    return op.api.call<ort::CreateStatus>(ort::kInvalidArgument,
                                          static_cast<const char*>(text.data()));
  };
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return report(error.what());
  } catch (...) {
    return report("failed");
  }
}

OrtStatus* create_node(const ort::CustomOp* entry, const void*, const OrtKernelInfo* info,
                       void** kernel) {
  const Op& op = op_of(entry);
  return reported(op, [&] {
    auto node = std::make_unique<Node>(Node{op});
    if (op.is.read != nullptr) op.is.read(op.api, info, *node);
    *kernel = node.release();
  });
}

OrtStatus* compute_node(void* kernel, OrtKernelContext* context) {
  const Node& node = *static_cast<const Node*>(kernel);
  return reported(node.op, [&] {
    Call call(node.op.api, context);
    node.op.is.compute(*node.op.kernels, node, call);
  });
}

ort::CustomOp make_entry() {
  ort::CustomOp entry{};
  entry.version = ort::kApiVersion;
  entry.get_name = [](const ort::CustomOp* op) { return op_of(op).is.name; };
  entry.get_provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
  entry.get_input_type = [](const ort::CustomOp* op, size_t i) { return op_of(op).is.inputs[i]; };
  entry.get_input_count = [](const ort::CustomOp* op) { return op_of(op).is.inputs.size(); };
  entry.get_output_type = [](const ort::CustomOp* op, size_t i) { return op_of(op).is.outputs[i]; };
  entry.get_output_count = [](const ort::CustomOp* op) { return op_of(op).is.outputs.size(); };
  entry.destroy_kernel = [](void* kernel) { delete static_cast<Node*>(kernel); };
  entry.get_input_kind = [](const ort::CustomOp* op, size_t i) {
    return op_of(op).is.has_segments && i == kSegments ? ort::kOptionalInput : 0;
  };
  entry.get_output_kind = [](const ort::CustomOp*, size_t) { return 0; };
  entry.get_input_memory = [](const ort::CustomOp*, size_t) { return ort::kMemTypeDefault; };
  entry.get_variadic_input_minimum = [](const ort::CustomOp*) { return 1; };
  entry.get_variadic_input_homogeneity = [](const ort::CustomOp*) { return 1; };
  entry.get_variadic_output_minimum = [](const ort::CustomOp*) { return 1; };
  entry.get_variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
  entry.create_kernel_v2 = create_node;
  entry.compute_v2 = compute_node;
  entry.get_start_version = [](const ort::CustomOp*) { return 1; };
  entry.get_end_version = [](const ort::CustomOp*) { return 1; };
  return entry;
}

}  // namespace
}  // namespace ops

CustomOps::CustomOps(const ort::Api& api, const Kernels& kernels)
    : api_(api), memory_(api), domain_(api) {
  ask<ort::CreateCustomOpDomain>(api, "dlm_export", domain_.out());
  ask<ort::CreateCpuMemoryInfo>(api, ort::kDeviceAllocator, ort::kMemTypeDefault, memory_.out());
  for (const auto& kind :
       {ops::linear_operators(), ops::expert_operators(), ops::attention_operators()})
    for (const ops::Definition& is : kind)
      ops_.push_back({ops::make_entry(), is, api, &kernels, memory_.get()});
  // ONNX Runtime stores pointers to the elements of ops_, so from here on these elements must not
  // move in memory.
  for (const ops::Op& op : ops_) ask<ort::CustomOpDomainAdd>(api, domain_.get(), &op.entry);
}

void CustomOps::add_to(OrtSessionOptions* options) const {
  ask<ort::AddCustomOpDomain>(api_, options, domain_.get());
}

}  // namespace dlm
