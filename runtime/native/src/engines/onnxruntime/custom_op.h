// The custom operators of the domain dlm_export for ONNX Runtime. The operators run the kernels of
// kernels/kernels.h.
//
// A bundle's graph also defines each of these operators as a function of standard ONNX operators,
// so that any engine can run the graph. If there are kernels for the processor, the runtime
// registers the custom operators. ONNX Runtime then uses a custom operator instead of the function
// with the same name.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <vector>

#include "base/error.h"
#include "engines/graph_check.h"
#include "engines/onnxruntime/ort_handles.h"
#include "kernels/kernels.h"

namespace dlm::ops {

// Element types that occur only in inputs of custom operators. engines/graph_check.h defines the
// element types of the graph's inputs and outputs.
constexpr int kUint8 = 2, kBool = 9, kFloat8 = 17;

// Short names of element types, for the tables of operators.
namespace short_types {
constexpr int F = kFloat, L = kInt64, H = kFloat16, B = kBFloat16, I = kInt8, C = kUint8,
              S = kFloat8;
}
constexpr size_t kMostWeights = 3, kMostDims = 5;
constexpr size_t kSegments = 8;  // index of the optional input `segments` of attention

// An input tensor of one operator call.
template <class Element>
struct Tensor {
  Element* data;
  std::array<int64_t, kMostDims> dims;
  size_t rank;

  bool is(std::initializer_list<int64_t> wanted) const {
    return wanted.size() == rank && std::equal(wanted.begin(), wanted.end(), dims.begin());
  }
  int64_t count() const {
    int64_t product = 1;
    for (size_t i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }
};

// One call of an operator. A Call gives access to the inputs and outputs, and runs tasks on the
// session's threads.
class Call final : public Parallel {
 public:
  Call(const ort::Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  template <class Element>
  Tensor<const Element> input(size_t index) const {
    const OrtValue* value = nullptr;
    ask<ort::KernelContextGetInput>(api_, context_, index, &value);
    if (value == nullptr) fail(DLM_BAD_BUNDLE, "input %zu is missing", index);
    Tensor<const Element> tensor{};
    Owned<OrtTensorTypeAndShapeInfo, ort::ReleaseTensorTypeAndShapeInfo> info(api_);
    ask<ort::GetTensorTypeAndShape>(api_, value, info.out());
    ask<ort::GetDimensionsCount>(api_, info.get(), &tensor.rank);
    if (tensor.rank > tensor.dims.size())
      fail(DLM_BAD_BUNDLE, "input %zu has %zu dimensions", index, tensor.rank);
    ask<ort::GetDimensions>(api_, info.get(), tensor.dims.data(), tensor.rank);
    void* data = nullptr;
    ask<ort::GetTensorMutableData>(api_, const_cast<OrtValue*>(value), &data);
    tensor.data = static_cast<const Element*>(data);
    return tensor;
  }

  bool has_input(size_t index) const {
    size_t count = 0;
    ask<ort::KernelContextGetInputCount>(api_, context_, &count);
    const OrtValue* value = nullptr;
    if (index < count) ask<ort::KernelContextGetInput>(api_, context_, index, &value);
    return value != nullptr;
  }

  template <class Element>
  Element* output(size_t index, std::initializer_list<int64_t> shape) {
    return output<Element>(index, shape.begin(), shape.size());
  }
  template <class Element>
  Element* output(size_t index, const int64_t* shape, size_t rank) {
    OrtValue* value = nullptr;
    void* data = nullptr;
    ask<ort::KernelContextGetOutput>(api_, context_, index, shape, rank, &value);
    ask<ort::GetTensorMutableData>(api_, value, &data);
    return static_cast<Element*>(data);
  }

  void run(size_t count, void (*task)(void* user, size_t i), void* user) override {
    if (count == 1) return task(user, 0);
    // Each task is a separate batch of work for ONNX Runtime. A thread that is free gets the next
    // batch, so a thread that starts late runs fewer tasks.
    ask<ort::KernelContextParallelFor>(api_, context_, task, count, count, user);
  }

  const ort::Api& api() const { return api_; }
  OrtKernelContext* context() const { return context_; }

 private:
  const ort::Api& api_;
  OrtKernelContext* const context_;
};

// Scratch memory for one call, aligned to 64 bytes. It comes from the session's allocator.
class Scratch {
 public:
  Scratch(const Call& call, const OrtMemoryInfo* memory, size_t bytes) : api_(call.api()) {
    ask<ort::KernelContextGetAllocator>(api_, call.context(), memory, &allocator_);
    OrtStatus* const failed =
        api_.call<ort::AllocatorAlloc>(allocator_, bytes + kAlignment, &data_);
    if (failed != nullptr) api_.call<ort::ReleaseAllocator>(allocator_);
    check(api_, failed, "ONNX Runtime");
  }
  ~Scratch() {
    OrtStatus* const reported = api_.call<ort::AllocatorFree>(allocator_, data_);
    if (reported != nullptr) api_.call<ort::ReleaseStatus>(reported);
    api_.call<ort::ReleaseAllocator>(allocator_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* get() const {
    const auto at = reinterpret_cast<uintptr_t>(data_);
    return reinterpret_cast<void*>((at + kAlignment - 1) / kAlignment * kAlignment);
  }

 private:
  static constexpr size_t kAlignment = 64;
  const ort::Api& api_;
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

struct Op;

// The attributes of one node of the graph. The comment on each field names the operators that have
// this attribute.
struct Node {
  const Op& op;
  // Linear layers: number of columns of each weight matrix.
  std::array<int64_t, kMostWeights> columns{};
  int64_t group_size = 0;           // Int4Linear and Int4Embedding
  int64_t heads = 0, kv_heads = 0;  // CachedAttention
  int64_t visible_block = 0;        // BlockCachedAttention
  int64_t window = 0;               // WindowCachedAttention
  bool has_drafts = false;          // DraftCachedAttention
  float epsilon = 0;                // AddNorm and NormedCachedAttention
  float scale = 0;                  // DraftNormedCachedAttention
};

struct Definition {
  const char* name;
  std::vector<int> inputs, outputs;  // element types
  // A function that reads the attributes of a node. NULL if the operator has no attributes.
  void (*read)(const ort::Api& api, const OrtKernelInfo* info, Node& node);
  void (*compute)(const Kernels& kernels, const Node& node, Call& call);
  bool has_segments = false;
};

// A custom operator. ONNX Runtime's struct must be the first member, because ONNX Runtime passes
// pointers to this struct, and the code converts them to pointers to Op.
struct Op {
  ort::CustomOp entry;
  Definition is;
  ort::Api api;
  const Kernels* kernels;
  const OrtMemoryInfo* memory;  // selects the allocator for scratch memory
};

void read_group_size(const ort::Api& api, const OrtKernelInfo* info, Node& node);

// Each of these functions returns the definitions of one kind of operators, and is in a separate
// file.
std::vector<Definition> linear_operators();
std::vector<Definition> expert_operators();
std::vector<Definition> attention_operators();

}  // namespace dlm::ops

namespace dlm {

// The custom operators of one session. This object must outlive the session.
class CustomOps {
 public:
  CustomOps(const ort::Api& api, const Kernels& kernels);

  void add_to(OrtSessionOptions* options) const;

 private:
  const ort::Api api_;
  std::vector<ops::Op> ops_;
  Owned<OrtMemoryInfo, ort::ReleaseMemoryInfo> memory_;
  Owned<OrtCustomOpDomain, ort::ReleaseCustomOpDomain> domain_;
};

}  // namespace dlm
