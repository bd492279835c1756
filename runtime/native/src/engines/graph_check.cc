#include "engines/graph_check.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "base/error.h"
#include "base/json.h"

namespace dlm {
namespace {

std::string type_text(int32_t type, const Dims& dims) {
  static constexpr const char* kNames[] = {"undefined",  "float",   "uint8",  "int8",   "uint16",
                                           "int16",      "int32",   "int64",  "string", "bool",
                                           "float16",    "double",  "uint32", "uint64", "complex64",
                                           "complex128", "bfloat16"};
  const bool is_known = type >= 0 && static_cast<size_t>(type) < std::size(kNames);
  std::string text = is_known ? kNames[type] : "type " + std::to_string(type);
  for (size_t i = 0; i < dims.size() && i < 8; ++i)
    text += (i == 0 ? " [" : ", ") + (dims[i] < 0 ? "any" : std::to_string(dims[i]));
  return text + (dims.size() > 8 ? ", ...]" : dims.empty() ? " []" : "]");
}

}  // namespace

size_t element_bytes(int32_t type) {
  return type == kInt64 ? 8 : type == kInt8 ? 1 : type == kFloat16 || type == kBFloat16 ? 2 : 4;
}

const char* type_name(int32_t type) {
  switch (type) {
    case kFloat:
      return "float32";
    case kFloat16:
      return "float16";
    case kBFloat16:
      return "bfloat16";
    case kInt8:
      return "int8";
    default:
      return "of an unknown type";
  }
}

std::array<int64_t, 4> Port::shape(int32_t batch, int32_t tokens, int32_t cached, int32_t rows,
                                   int32_t window_cached) const {
  // `sizes` is in the order of enum Extent, whose values are -1 to -5. So if dims[i] is below 0,
  // sizes[-1 - dims[i]] is the size of dimension i.
  const int64_t sizes[] = {tokens, cached, rows, batch, window_cached};
  std::array<int64_t, 4> out{};
  for (size_t i = 0; i < dims.size(); ++i) out[i] = dims[i] < 0 ? sizes[-1 - dims[i]] : dims[i];
  return out;
}

size_t Port::bytes(const std::array<int64_t, 4>& shape) const {
  size_t bytes = element_bytes(type);
  for (size_t i = 0; i < dims.size(); ++i)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(shape[i]), &bytes))
      fail(DLM_OUT_OF_MEMORY, "\"%s\" is too large for memory", name.c_str());
  return bytes;
}

Ports list_ports(const GraphSpec& graph, int64_t batch) {
  const PortNames& names = graph.ports;
  Ports ports;
  ports.inputs = {{names.input_ids, kInt64, {batch, kT}},
                  {names.position_ids, kInt64, {batch, kT}},
                  {names.score_rows, kInt64, {batch, kR}}};
  ports.outputs = {{names.top_token, kInt32, {batch, kR, graph.top_k}},
                   {names.top_prob, kFloat, {batch, kR, graph.top_k}},
                   {names.top_log_odds, kFloat, {batch, kR, graph.top_k}},
                   {names.entropy, kFloat, {batch, kR}},
                   {names.logits, kFloat, {batch, kR, graph.vocab_size}}};
  for (size_t i = 0; i < names.layers.size(); ++i) {
    const PortNames::Layer& layer = names.layers[i];
    const CacheLayer& cache = graph.cache[i];
    const auto width = static_cast<int64_t>(cache.row_bytes()) / cache.element_bytes;
    for (const std::string* const name : {&layer.past_key, &layer.past_value})
      ports.inputs.push_back(
          {*name, graph.cache_type, {batch, cache.kv_heads, cache.window > 0 ? kW : kS, width}});
    for (const std::string* const name : {&layer.present_key, &layer.present_value})
      ports.outputs.push_back({*name, graph.cache_type, {batch, cache.kv_heads, kT, width}});
  }
  if (graph.conditioning_size > 0) {
    ports.inputs.push_back({names.conditioning, kFloat, {batch, kT, graph.conditioning_size}});
    ports.inputs.push_back({names.temperature, kFloat, {batch, kR}});
    ports.outputs.push_back(
        {names.next_conditioning, kFloat, {batch, kR, graph.conditioning_size}});
  }
  return ports;
}

Port* find_port(std::vector<Port>& ports, const std::string& name) {
  const auto found =
      std::find_if(ports.begin(), ports.end(), [&](const Port& port) { return port.name == name; });
  return found == ports.end() ? nullptr : &*found;
}

void note_port(const std::string& path, const char* kind, Port& port, int32_t type,
               const Dims& dims) {
  // A dim below 0 in the graph accepts any size. The graph needs such a dim if the size changes
  // from pass to pass. If the manifest fixes the size, such a dim is allowed too, because the sizes
  // of each pass are checked.
  const auto fits = [](int64_t there, int64_t wanted) { return there < 0 || there == wanted; };
  if (type != port.type ||
      !std::equal(dims.begin(), dims.end(), port.dims.begin(), port.dims.end(), fits))
    refuse_port(path, kind, port.name,
                "is " + type_text(type, dims) + ", but the manifest makes it " +
                    type_text(port.type, port.dims));
  port.is_there = true;
}

void check_complete(const std::string& path, const char* kind, const std::vector<Port>& ports) {
  for (const Port& port : ports)
    if (!port.is_there) refuse_port(path, kind, port.name, "is missing");
}

void refuse_port(const std::string& path, const char* kind, const std::string& name,
                 const std::string& reason) {
  throw Error(DLM_BAD_BUNDLE, path + ": the " + kind + " " + json::quoted(name) + " " + reason);
}

void check_finite(const float* top_probs, size_t count) {
  if (std::all_of(top_probs, top_probs + count, [](float p) { return std::isfinite(p); })) return;
  fail(DLM_ENGINE_FAILED,
       "the denoiser's probabilities are not finite: NaN weights, or overflow at this precision");
}

void check_pass(const dlm_pass& pass) {
  // If a pass scores 0 rows, a kernel of ONNX Runtime before 1.31 divides by zero, which crashes
  // the process.
  if (pass.batch < 1 || pass.tokens < 1 || pass.cached < 0 || pass.rows < 1)
    fail(DLM_INTERNAL, "a pass of %d x %d tokens, %d cached and %d rows", pass.batch, pass.tokens,
         pass.cached, pass.rows);
}

}  // namespace dlm
