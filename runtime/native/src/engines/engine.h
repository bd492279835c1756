// The interface between the decoding loop and the engines that run the denoiser.
//
// An Engine holds the weights, which all threads share. Each session opens a Context. The Context
// owns the session's buffers and its cache of keys and values, in the memory that the engine uses
// (host or device). The loop only tells the Context how a pass uses the cache. It never accesses
// the keys and values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/segment.h"
#include "dlm_runtime.h"

namespace dlm {

// The sizes of one layer's cache. The keys have shape [B, kv_heads, rows, head_size], and so have
// the values. With int8, each row ends with its scale.
struct CacheLayer {
  int32_t kv_heads, head_size, element_bytes, scale_bytes = 0;

  size_t row_bytes() const { return static_cast<size_t>(head_size) * element_bytes + scale_bytes; }
  size_t tensor_bytes(int32_t batch, int32_t rows) const {
    return static_cast<size_t>(batch) * kv_heads * rows * row_bytes();
  }
};

// The cache sizes of all layers, one entry per layer.
using CacheShape = std::vector<CacheLayer>;

// The properties of the denoiser that the loop needs. They have been checked.
struct Denoiser {
  int32_t vocab_size, mask_token_id, max_canvas_length, top_k, shift;
  bool has_cache;
  CacheShape cache;  // at least one layer, but unused if has_cache is false
  std::vector<int32_t> eos_token_ids;
  int32_t visible_block = 0;     // block length of block-causal attention; 0: full attention
  int32_t max_new_tokens = 128;  // default for a request

  bool is_end(int32_t token) const {
    return std::find(eos_token_ids.begin(), eos_token_ids.end(), token) != eos_token_ids.end();
  }
};

// How a pass uses the cache of its context. T is the number of new tokens, and S is the number of
// cached positions that the pass reads.
enum class CacheUse {
  none,  // reads no rows (S is 0); does not store the T new rows
  // Reads no rows (S is 0). Stores the T new rows, from which keep_outside then selects, and drops
  // all other rows. Also sets the batch size B of the cache.
  write,
  read,     // reads the S rows that keep_outside selected; stores no rows
  refresh,  // reads the same rows as `read`, and stores the T new rows
  append    // reads positions [0, S), if any; stores only the T new rows, after them
};

// True if the pass stores its new rows.
constexpr bool keeps_rows(CacheUse use) { return use != CacheUse::none && use != CacheUse::read; }

// The number of rows to allocate if `rows` are needed. The capacity is doubled, so that rows are
// copied only a few times. It never exceeds the longest canvas, unless `rows` does.
inline int32_t grown(int32_t capacity, int32_t rows, int32_t longest) {
  return std::max(rows, capacity > longest / 2 ? longest : 2 * capacity);
}

// Holds pointers to the keys and values of all layers, and puts them into a pass.
class KeyValues {
 public:
  explicit KeyValues(size_t layers) : nothing_(layers) {
    for (const int i : {0, 1}) past_[i].resize(layers), present_[i].resize(layers);
  }

  // The tensors of layer i are numbered 2i (keys) and 2i + 1 (values).
  void set_past(size_t tensor, const void* rows) { past_[tensor % 2][tensor / 2] = rows; }
  void set_present(size_t tensor, void* rows) { present_[tensor % 2][tensor / 2] = rows; }

  // Sets the pointers of a pass. They stay valid until this object is destroyed.
  void put(dlm_pass& pass, bool has_past, bool has_present) const {
    pass.layers = static_cast<int32_t>(nothing_.size());
    pass.past_keys = (has_past ? past_[0] : nothing_).data();
    pass.past_values = (has_past ? past_[1] : nothing_).data();
    pass.present_keys = has_present ? present_[0].data() : nullptr;
    pass.present_values = has_present ? present_[1].data() : nullptr;
  }

 private:
  std::vector<const void*> nothing_, past_[2];  // nothing_ has NULL for every layer
  std::vector<void*> present_[2];
};

class Context {
 public:
  virtual ~Context() = default;

  // Runs one pass over contiguous positions, which are the same for each request of the batch. The
  // caller sets all fields of the pass except `layers` and the pointers to keys and values, which
  // the context sets. Throws Error(DLM_ENGINE_FAILED) or another error that ends the request.
  virtual void run(const dlm_pass& pass, CacheUse use) = 0;

  // Selects the rows that later passes read: those of all positions outside [first, last). These
  // rows must be stored already, or come from the last pass. Their order does not matter, because
  // keys include their positions.
  virtual void keep_outside(int32_t first, int32_t last) = 0;

  // The bytes of the batch's keys and values now. They cover the whole canvas or, with `append`,
  // the rows appended so far.
  virtual uint64_t cache_bytes() const = 0;
};

class Arena;

class Engine {
 public:
  virtual ~Engine() = default;

  // Opens a context, which only one thread may use at a time. The engine must outlive the context.
  // `longest` is the denoiser's max_canvas_length, which limits the rows of an appended cache.
  virtual std::unique_ptr<Context> open_context(int32_t longest) = 0;

  // True if one pass can run several requests as segments. Otherwise requests run in lockstep.
  virtual bool takes_segments() const { return false; }

  // Allocates `rows` key/value rows for passes that several requests share. Returns NULL if the
  // engine does not support such passes. The engine must outlive the arena.
  virtual std::unique_ptr<Arena> open_arena(int64_t rows);

  // One line for people with the engine's name, version and provider.
  virtual std::string description() const = 0;

  // The most rows that a pass of T `tokens` over S `cached` ones may score. 0 means that the engine
  // cannot run such a pass.
  virtual int32_t max_rows(int32_t /*tokens*/, int32_t /*cached*/) const { return INT32_MAX; }

  // The most requests that one pass can run (B).
  virtual int32_t max_batch() const { return INT32_MAX; }

  // Describes the sizes that limit max_rows, for messages. Returns "" if there is no limit.
  virtual std::string limits() const { return ""; }
};

// An engine that needs nothing but the buffers in dlm_pass. Its contexts own the cache, and set the
// pass's pointers to the cached rows. The cache is in host memory, unless a derived engine opens
// other contexts.
class HostEngine : public Engine {
 public:
  explicit HostEngine(CacheShape cache) : cache_(std::move(cache)) {}

  std::unique_ptr<Context> open_context(int32_t longest) override;
  std::unique_ptr<Arena> open_arena(int64_t rows) override;

  // Runs a pass in which all fields of dlm_pass are set. Several contexts may call it at once.
  // `segments` divides the tokens between requests; B is then 1, and S counts the rows of all
  // requests. If `segments` is empty, the pass runs B requests of the same shape.
  virtual void run(const dlm_pass& pass, const std::vector<Segment>& segments) = 0;

 protected:
  const CacheShape cache_;
};

// The names of a graph's inputs and outputs.
struct PortNames {
  struct Layer {
    std::string past_key, past_value, present_key, present_value;
  };
  std::string input_ids, position_ids, score_rows, top_token, top_prob, entropy, logits;
  std::string segments{};  // "" if the graph has no such input
  std::vector<Layer> layers{};
};

// What engines need to know about a bundle's graph, from the manifest.
struct GraphSpec {
  std::string path;         // path of denoiser.onnx
  std::string device_path;  // path of device.onnx, the same graph for GPUs; may be empty
  int32_t vocab_size, top_k;
  CacheShape cache;
  int32_t cache_type;  // element type of the cache, see engines/graph_contract.h
  bool simulated;      // true: the graph computes on quantised values in floating point
  PortNames ports;     // has as many layers as `cache`
};

// The range of a size that an engine's profile accepts, and the size that the engine was tuned for.
struct Sizes {
  int32_t smallest, best, largest;
};

// The sizes of the passes that one profile of a TensorRT engine accepts.
struct Profile {
  Sizes tokens, cached, rows;
};

// Returns a compute capability as people write it. For example, 89 becomes "8.9".
inline std::string sm_text(int32_t sm) {
  return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

// One TensorRT engine of a bundle, as the manifest describes it.
struct EngineSpec {
  std::string target, path, builder, version;  // builder is "tensorrt" or "tensorrt_rtx"
  std::string bundle;                          // the bundle's folder, for messages
  std::vector<int32_t> sm;  // compute capabilities of devices that can run it; 89 means 8.9
  Profile prefill, block;   // the engine's profiles 0 and 1
};

// The ONNX Runtime provider that runs the graph, from the fields of dlm_open_options.
struct ProviderChoice {
  std::string name = "cpu";
  int32_t device = 0;
  bool allow_fallback = false;

  bool is_gpu() const { return name != "cpu"; }
};

// Opens the engine that runs the graph with ONNX Runtime. libonnxruntime is loaded from the path
// `library`, or from the places that dlm_open_options lists. With threads = 0, all cores are used.
// Throws Error(DLM_ENGINE_MISSING) if the library, its provider or a dependency is missing. Throws
// Error(DLM_UNSUPPORTED) if nodes would run on the CPU and `provider` does not allow that.
std::unique_ptr<Engine> open_onnxruntime(const GraphSpec& graph, const std::string& library,
                                         int threads, const ProviderChoice& provider);

// Opens the one of the bundle's TensorRT engines that fits the device and the installed TensorRT.
// TensorRT is loaded from the path `library`, or from the places that dlm_open_options lists.
// Throws Error(DLM_ENGINE_MISSING) if something is missing, and Error(DLM_UNSUPPORTED) if no engine
// fits.
std::unique_ptr<Engine> open_tensorrt(const GraphSpec& graph,
                                      const std::vector<EngineSpec>& engines,
                                      const std::string& library);

// Makes an engine that calls the caller's function `run` for each pass. If a row has a NaN or +inf
// logit, its probabilities become NaN, which ends the request.
std::unique_ptr<HostEngine> make_callback(dlm_pass_fn run, void* user, const Denoiser& denoiser);

// Makes the engine of a bundle that is only inspected. Every pass throws Error(DLM_UNSUPPORTED).
std::unique_ptr<Engine> make_none(CacheShape cache);

}  // namespace dlm
