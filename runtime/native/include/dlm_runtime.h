/* dlm_runtime.h: the C ABI of libdlm_runtime, the native runtime of dlm-export.
 *
 * The library opens a bundle (a folder that `dlm-export build` wrote) and fills canvases of mask
 * tokens with the bundle's denoiser:
 *
 *   dlm_bundle_open -> dlm_session_create -> dlm_session_generate -> read dlm_result
 *
 * A request (dlm_request) says what to fill and how. A session runs requests on the caller's
 * thread. A scheduler (dlm_scheduler) accepts requests from any thread, and one thread of the
 * program runs them. Both give the same results (dlm_result).
 *
 * Conventions
 * - A call that can fail returns dlm_status. It writes its result to the trailing out-pointer, or
 *   NULL or 0 on failure.
 * - The caller destroys each object that it creates. Destroying NULL does nothing. Pointers passed
 *   in are borrowed for the call, unless the comment says otherwise.
 * - Every struct that may grow starts with struct_size, and grows only at its end.
 *     Structs that the caller fills: call the _init function with sizeof(struct), then change
 *     fields. Each field's default is in parentheses, or marked "default". The library rejects a
 *     struct larger than it knows with INVALID_ARGUMENT, because it would ignore the last fields.
 *     Structs that the library fills: the library owns them and returns a pointer. struct_size is
 *     the number of bytes available.
 * - A value outside its range is an error: INVALID_ARGUMENT. Ranges include both ends.
 * - New versions may add values to enumerations (DLM_FINISH_..., DLM_TEXT_...). The library rejects
 *   unknown values; programs should accept them.
 * - Threads: any number of threads may share a bundle. A session belongs to one thread at a time,
 *   except for dlm_session_cancel. Threads may share a scheduler. Each of its jobs belongs to one
 *   thread at a time, except for dlm_job_cancel. A bundle must outlive its sessions and schedulers.
 * - The library prints nothing, keeps no global state, never calls exit, and throws no exception.
 * - Text is UTF-8. Text without a size ends with NUL. Token ids are int32. A canvas is an array of
 *   token ids.
 */
#ifndef DLM_RUNTIME_H
#define DLM_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLM_API __attribute__((visibility("default")))

/* Increases when a change breaks compiled programs. A new function, or a field at the end of a
 * struct with struct_size, does not increase it. */
#define DLM_ABI_VERSION 1
DLM_API uint32_t dlm_abi_version(void); /* DLM_ABI_VERSION of the loaded library */
DLM_API const char* dlm_version(void);  /* such as "0.1.0"; static */

typedef int32_t dlm_status;
enum {
  DLM_OK = 0,
  DLM_INVALID_ARGUMENT =
      1,               /* the request is wrong: an id outside the vocabulary, an unknown value */
  DLM_NOT_FOUND = 2,   /* a bundle, one of its files, or a preset is missing */
  DLM_BAD_BUNDLE = 3,  /* damaged, hostile, or of a schema version that this library cannot read */
  DLM_UNSUPPORTED = 4, /* well-formed, but this library or this denoiser cannot do it */
  DLM_ENGINE_FAILED = 5, /* the inference engine reported an error, or its results are not finite */
  DLM_OUT_OF_MEMORY = 6, /* of the host or the device */
  DLM_CANCELLED = 7,     /* a callback asked to stop, and the request was dropped */
  DLM_INTERNAL = 8,      /* a defect of this library; please report it with the message */
  DLM_ENGINE_MISSING = 9, /* the engine's library is missing, too old, or cannot be loaded */
  DLM_BUSY = 10           /* the scheduler's queue is full: submit the request again later */
};
DLM_API const char* dlm_status_name(dlm_status status); /* static, never NULL */

/* ---- Denoisers and passes -------------------------------------------------------------------- */

/* The properties of a denoiser that the loop needs. Shape letters: B requests in a pass, T tokens
 * of each, S cached tokens, R scored rows, V vocabulary, K candidates per row. */
typedef struct dlm_denoiser {
  size_t struct_size;
  int32_t vocab_size;        /* V, 3..16777216 */
  int32_t mask_token_id;     /* 0..V-1 */
  int32_t max_canvas_length; /* tokens, 1..16777216 */
  int32_t layers;            /* 1..1024 */
  int32_t kv_heads;          /* of every layer, 1..4096; 0 (only from a bundle): layers differ */
  int32_t head_size;         /* of every layer, 1..4096; 0 (only from a bundle): layers differ */
  int32_t top_k;             /* K: candidates that a pass returns per row, 2..64, below V */
  int32_t kv_element_bytes;  /* 4: fp32, 2: fp16 or bf16, 1: int8 (a row has 2 more bytes) */
  int32_t shift;             /* 1: the row of position i predicts position i + 1; 0: position i */
  int32_t has_cache;         /* 1: a pass reads past and writes present keys and values; 0: no */
  const int32_t* eos_token_ids; /* [eos_count], end tokens, 0..V-1; not the mask token */
  size_t eos_count;             /* 0..1024 */
  int64_t visible_block;        /* 0..16777216. n: no row sees a later block of n positions, counted
                                   from position 0 (block-causal attention); 0: every row sees all
                                   (full attention) */
  int32_t max_new_tokens;       /* for requests with DLM_DEFAULT_NEW_TOKENS, 1..16777216 (128) */
} dlm_denoiser;
DLM_API void dlm_denoiser_init(dlm_denoiser* denoiser, size_t struct_size);

/* One pass of the denoiser, over the same positions of B independent canvases. The engine reads the
 * const members and fills the others. Keys and values are [B, kv_heads, rows, head_size] per layer,
 * position-encoded, with rows = S for past and rows = T for present. */
typedef struct dlm_pass {
  size_t struct_size;
  int32_t batch;               /* B: above 1 only for guided requests and batches */
  int32_t tokens;              /* T */
  int32_t cached;              /* S */
  int32_t rows;                /* R */
  int32_t layers;              /* length of the four arrays of pointers */
  const int64_t* input_ids;    /* [B, T] */
  const int64_t* position_ids; /* [B, T], absolute */
  const int64_t* score_rows;   /* [B, R], 0..T-1 */
  const void *const *past_keys, *const *past_values;
  void *const *present_keys, *const *present_values; /* NULL if the pass stores no rows */
  int32_t* top_tokens; /* [B, R, K], best first, ties by lowest id, never the mask token */
  float* top_probs;    /* [B, R, K], softmax in fp32 without the mask token */
  float* entropy; /* [B, R], sum p ln(p + 1e-10) <= 0 without the mask token; NULL if not needed */
  float* logits;  /* [B, R, V], raw: finite, or -infinity for a token that is ruled out; NULL if not
                     needed. The mask token's logit is ignored. NaN or +infinity in a row ends the
                     request with ENGINE_FAILED */
} dlm_pass;

/* Runs one pass. Any status but DLM_OK ends the requests of the pass with that status. */
typedef dlm_status (*dlm_pass_fn)(void* user, const dlm_pass* pass);

/* ---- Policy ---------------------------------------------------------------------------------- */

/* Decides which tokens commit after each pass. A bundle's presets fill it, and callers change
 * fields. Choices are strings, so that a policy has the same values in C, in Python and in
 * manifest.json. The strings are borrowed: literals, or owned by the bundle. */
typedef struct dlm_policy {
  size_t struct_size;
  const char* select;  /* "argmax" (default): the most likely token | "sample": drawn at
                          `temperature` */
  const char* score;   /* "confidence" (default) | "margin" | "entropy" | "random" */
  const char* commit;  /* "static" (default) | "threshold" | "dynamic" | "factor" |
                          "entropy_bound" | "timestep" | "sequential" */
  const char* compare; /* ">=" (default) | ">": how a score passes the threshold */
  const char* remask; /* "none" (default) | "edit": the tokens of a finished block may still change,
                         see edit_threshold */
  const char* cache;  /* "none" (default) | "prefix", "dual": for full attention | "block",
                         "block-dual": for block-causal attention; "block-dual" also has passes
                         over a sub-block alone */
  const char* stop;   /* "eos" (default): skips the blocks after one that committed eos | "none" */
  int32_t block_length;    /* tokens, 0..16777216 (32); 0: the whole generation is one block. With
                              block-causal attention, blocks count from position 0, 0 means
                              visible_block, and other values must be multiples of it */
  int32_t steps_per_block; /* planned passes per block, 0..16777216; 0 (default): one per token */
  int32_t refresh;  /* tokens, 0..16777216; for cache "prefix" and "dual". 0 (default): every block
                       starts with a full pass. N: only the first block does. Each later one starts
                       with a pass over the positions that its other passes run, and at least the N
                       tokens and the one block before it */
  double threshold; /* for commit "threshold" and "dynamic", 0..1 (0.9) */
  double factor;    /* for commit "factor", 0..1e9 (1) */
  double entropy_bound; /* for commit "entropy_bound", nats, 0..1e9 (0.1) */
  double timestep_eps;  /* for commit "timestep", 1e-9..1 (1e-3) */
  double temperature; /* divides logits; for select "sample", above 0, up to 1e300. 0 (default) for
                         "argmax" */
  uint64_t seed; /* for score "random" and select "sample" (0). The same seed gives the same text
                    with any engine, number of threads and batch, except where floating-point noise
                    of the engine changes it */
  const char* store; /* for cache "block": how a finished block is stored. "pass" (default): by one
                        more pass over it, which is exact | "open": that pass also runs the next
                        block and commits in it; the canvas is the same | "reuse": keeps the rows of
                        the block's last pass, when some of its tokens were still masked */
  int32_t sub_block_length; /* positions of a block that are decided before the next ones,
                               0..16777216; for block-causal attention. Must divide block_length.
                               0 (default): all together */
  int32_t edit_passes;      /* the most passes over a finished block, 0..16777216 (16); for remask
                               "edit". Stops after the first pass that changes nothing */
  double edit_threshold;    /* for remask "edit", 0..1 (0.9): a token of a finished block changes if
                               another token's probability is above this */
  double top_p;  /* for select "sample", 0..1 (1): draws from the shortest list of the most likely
                    tokens whose total probability is above this */
  int32_t top_k; /* for select "sample", 0..16777216: draws from this many of the most likely
                    tokens; 0 (default): all */
  const char* score_of; /* the distribution that scores use. "prediction" (default): the denoiser's
                           softmax | "draw", for select "sample": the one that is drawn from, after
                           temperature, top_p and top_k | "marginal": for a constrained request, the
                           marginals over all texts of the constraint; otherwise as "prediction" */
  double
      cfg_scale; /* w of classifier-free guidance, 0..1000: each pass also runs the canvas with
                    all given tokens masked, and logits become without + (w + 1)(with - without).
                    0 (default): no guidance. UNSUPPORTED if the engine takes one canvas a pass */
} dlm_policy;
/* LLaDA's loop: static, confidence, blocks of 32, no cache. */
DLM_API void dlm_policy_init(dlm_policy* policy, size_t struct_size);

/* Describes one field of dlm_policy, for tools and language bindings. */
typedef struct dlm_policy_field {
  size_t struct_size;
  const char* name;
  int32_t kind;               /* DLM_FIELD_... */
  size_t offset;              /* bytes from the start of dlm_policy */
  const char* const* choices; /* for DLM_FIELD_CHOICE: the values, default first, then NULL. NULL
                                 for other kinds */
  double initial;             /* for the other kinds: the default */
  double lowest, highest;     /* for the other kinds: the range, both ends included */
} dlm_policy_field;
enum {
  DLM_FIELD_CHOICE = 0, /* const char* */
  DLM_FIELD_INT32 = 1,
  DLM_FIELD_DOUBLE = 2,
  DLM_FIELD_UINT64 = 3
};

/* Returns the field with this index, from 0, in the order of dlm_policy without struct_size; NULL
 * after the last. Static. */
DLM_API const dlm_policy_field* dlm_policy_field_at(size_t index);

/* ---- Bundle ---------------------------------------------------------------------------------- */

typedef struct dlm_bundle dlm_bundle;

typedef struct dlm_open_options {
  size_t struct_size;
  const char* engine;         /* "auto" (default): "tensorrt" if the bundle was built for GPUs, else
                                 "onnxruntime" | "onnxruntime" | "tensorrt" | "none": checks the
                                 bundle, but cannot make passes */
  const char* engine_library; /* path of libonnxruntime, libnvinfer or libtensorrt_rtx; NULL
                                 (default): $DLM_ONNXRUNTIME or $DLM_TENSORRT, then the system's */
  int32_t threads;        /* for "onnxruntime", 0..4096; 0 (default): all cores. Never starts more
                             threads than the cores that the process may use */
  int32_t check_hashes;   /* 1 (default): compares every file with the SHA-256 in the manifest; 0:
                             sizes only. A large file that has not changed since its hash was right
                             is not hashed again, unless $DLM_HASH_FILES is "always" (default:
                             "changed") or engine is "none" */
  const char* provider;   /* for "onnxruntime": "cpu" (default) | "cuda" | "tensorrt" |
                             "nv_tensorrt_rtx". With a GPU provider, "auto" means "onnxruntime" */
  int32_t device;         /* the GPU's number for these providers, as CUDA counts from 0 (0) */
  int32_t allow_fallback; /* 1: the CPU runs nodes that the provider cannot run, and
                             dlm_bundle_info.engine lists them; 0 (default): such nodes cause
                             UNSUPPORTED, and the message lists them */
} dlm_open_options;
DLM_API void dlm_open_options_init(dlm_open_options* options, size_t struct_size);

/* Notes on engines
 *
 * "onnxruntime" on a CPU uses this library's kernels where they are faster: the first set of
 * "amx-int8", "avx512-vnni", "avx-vnni", "avx2" or "neon-dotprod" that the processor supports.
 * $DLM_KERNELS selects another set, or "none". Checking for "amx-int8" asks the system for
 * permission to use AMX registers; then signal frames of threads that use them grow by 8 KiB.
 *
 * ONNX Runtime's official builds store a device id and send telemetry unless $ORT_DISABLE_TELEMETRY
 * is 1 before they start. Opening with engine "onnxruntime" sets it to 1 if it is not set. If other
 * threads of the program may read the environment at that time, set it before you start them.
 *
 * GPU providers need ONNX Runtime 1.24 or newer, built with the provider (onnxruntime-gpu), and the
 * driver ($DLM_CUDA_LIBRARY, by default libcuda.so.1). They run the bundle's graph for GPUs if it
 * has one. A session keeps its keys and values on the device.
 *
 * "tensorrt" needs a library that was compiled with TensorRT's headers. It runs on the first CUDA
 * device (select it with $CUDA_VISIBLE_DEVICES), with the bundle's engine file for that device and
 * exactly the loaded TensorRT version. If no file fits, the message gives the reason for each.
 */

/* A set of kernels. */
typedef struct dlm_kernel_set {
  const char* name;
  const char* refusal; /* why it cannot run here; NULL if it can */
} dlm_kernel_set;

/* Returns the kernel set with this index, from 0, of all sets for this architecture, fastest first;
 * NULL after the last. Static. */
DLM_API const dlm_kernel_set* dlm_kernel_set_at(size_t index);

/* Opens the bundle in the folder `path`, checks it, and loads its engine. options may be NULL. On
 * failure, writes the reason to `message`, up to message_capacity bytes with its NUL; message may
 * be NULL. This holds for every call with these two arguments. NOT_FOUND, BAD_BUNDLE, UNSUPPORTED,
 * ENGINE_MISSING, ENGINE_FAILED, OUT_OF_MEMORY. */
DLM_API dlm_status dlm_bundle_open(const char* path, const dlm_open_options* options, char* message,
                                   size_t message_capacity, dlm_bundle** bundle);

/* Creates a bundle without files, whose passes `run` makes. Copies *denoiser. `user` must outlive
 * the bundle. The threads that run sessions and schedulers call `run`, possibly at the same time.
 */
DLM_API dlm_status dlm_bundle_from_callback(const dlm_denoiser* denoiser, dlm_pass_fn run,
                                            void* user, char* message, size_t message_capacity,
                                            dlm_bundle** bundle);
DLM_API void dlm_bundle_destroy(dlm_bundle* bundle);

/* Properties of a bundle, which owns all of them. */
typedef struct dlm_bundle_info {
  size_t struct_size;
  const dlm_denoiser* denoiser;
  const char* manifest; /* the text of manifest.json; "" for a callback bundle */
  const char* engine;   /* one line for people, such as "onnxruntime 1.31.1 (CPU)" */
} dlm_bundle_info;
DLM_API const dlm_bundle_info* dlm_bundle_describe(const dlm_bundle* bundle); /* NULL for NULL */

/* Fills *policy with a preset of the bundle; call dlm_policy_init on it first. preset: a name, or
 * NULL for the bundle's default. effort: NULL, or "instant", "low", "medium" or "high" (fewest
 * passes first), for the tuned form of the preset that the levels were fitted for. NOT_FOUND, with
 * the valid names, for an unknown one; INVALID_ARGUMENT for an effort with another preset. */
DLM_API dlm_status dlm_bundle_policy(const dlm_bundle* bundle, const char* preset,
                                     const char* effort, char* message, size_t message_capacity,
                                     dlm_policy* policy);

/* ---- Text ------------------------------------------------------------------------------------ */

/* A tokenizer and chat template, compiled into one of the bundle's files. Token ids are those of
 * Hugging Face tokenizers, and rendered chats those of Jinja: the build compares them, and omits
 * the file if they differ. Any number of threads may share one. Text has a size in bytes and may
 * contain NUL. Invalid UTF-8 is INVALID_ARGUMENT. */
typedef struct dlm_text dlm_text;

/* Returns the bundle's text, which the bundle owns. The first call reads the file. UNSUPPORTED,
 * with the reason, if the bundle has no such file. */
DLM_API dlm_status dlm_bundle_text(dlm_bundle* bundle, char* message, size_t message_capacity,
                                   const dlm_text** text);

/* Reads one from memory; copies the data. BAD_BUNDLE for damaged data. */
DLM_API dlm_status dlm_text_read(const void* data, size_t size, char* message,
                                 size_t message_capacity, dlm_text** text);
DLM_API void dlm_text_destroy(dlm_text* text); /* not for a result of dlm_bundle_text */

/* Flags of dlm_text_encode and dlm_chat_encode. */
enum {
  DLM_ENCODE_PROMPT = 1, /* adds the tokens that the tokenizer puts around a prompt */
  DLM_ENCODE_SPECIAL = 2 /* text of a special token, such as "<|eos|>", becomes that token;
                            otherwise it is ordinary text */
};

/* Encodes a text. flags: a sum of DLM_ENCODE_ values. Sets *count to the number of ids. If it is
 * more than capacity, writes only the first `capacity` ids; a first call may pass capacity 0.
 * INVALID_ARGUMENT for text that encodes to a special token without DLM_ENCODE_SPECIAL. */
DLM_API dlm_status dlm_text_encode(const dlm_text* text, const char* string, size_t size,
                                   int32_t flags, char* message, size_t message_capacity,
                                   int32_t* tokens, size_t capacity, size_t* count);

/* Decodes token ids, and leaves out special tokens. U+FFFD replaces bytes that are not a complete
 * character. Sets *size to the number of bytes; there is no NUL. Writes at most `capacity` bytes.
 */
DLM_API dlm_status dlm_text_decode(const dlm_text* text, const int32_t* tokens, size_t count,
                                   char* message, size_t message_capacity, char* string,
                                   size_t capacity, size_t* size);

/* A message of a chat. Messages are passed in arrays, so this struct cannot grow within an ABI
 * version. */
typedef struct dlm_message {
  const char* role; /* a role of the template: "system", "user", "assistant", "tool" */
  const char* content;
  size_t content_size; /* bytes */
} dlm_message;

/* Renders a chat as text, up to the assistant's reply. size and capacity are as in dlm_text_decode.
 * UNSUPPORTED, with the message's number and the reason, if the template does more than put
 * contents between fixed texts. */
DLM_API dlm_status dlm_chat_render(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, char* message, size_t message_capacity,
                                   char* string, size_t capacity, size_t* size);

/* Encodes a chat, up to the assistant's reply. The template's special tokens become tokens. The
 * text of a special token in a message's content stays ordinary text, unless flags is
 * DLM_ENCODE_SPECIAL. Prefer this call to encoding the result of dlm_chat_render, where the two
 * look the same. count and capacity are as in dlm_text_encode. */
DLM_API dlm_status dlm_chat_encode(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, int32_t flags, char* message,
                                   size_t message_capacity, int32_t* tokens, size_t capacity,
                                   size_t* count);

/* ---- Constraints ----------------------------------------------------------------------------- */

/* What a generated text may be: an automaton over token ids. It is compiled for one vocabulary. Any
 * number of requests and threads may share one. */
typedef struct dlm_automaton dlm_automaton;

/* Kinds of dlm_constraint.content. Expressions are matched as a whole. */
enum {
  DLM_CONSTRAINT_REGEX = 0,       /* a regular expression in the syntax of Rust's regex crate */
  DLM_CONSTRAINT_SCHEMA = 1,      /* a JSON Schema; the text is JSON that is valid by it */
  DLM_CONSTRAINT_ENUM = 2,        /* a JSON list of strings; the text is one of them */
  DLM_CONSTRAINT_JSON_OBJECT = 3, /* any JSON object; content is "" */
  DLM_CONSTRAINT_TREE = 4,        /* a tree of JSON objects: texts, expressions, schemas, grammars,
                                     JSON Lines, CSV and XML, in sequence or as alternatives. The C
                                     guide, docs/guides/c-api.md, lists its members */
  DLM_CONSTRAINT_GRAMMAR = 5,     /* a context-free grammar in GBNF, the notation of llama.cpp */
  DLM_CONSTRAINT_COMPILED = 6,    /* what dlm_automaton_write gives, or dlm-export compile writes */
  DLM_CONSTRAINT_FILE = 7         /* the path of a file with such content */
};

/* The first token of a text by the program's tokenizer, or -1 if it does not know. */
typedef int32_t (*dlm_first_token_fn)(void* user, const char* string, size_t size);

/* What to compile. Defaults are in parentheses. */
typedef struct dlm_constraint {
  size_t struct_size;
  int32_t kind;        /* DLM_CONSTRAINT_... (DLM_CONSTRAINT_REGEX) */
  const char* content; /* as the kind says; must be set (NULL) */
  size_t content_size; /* bytes (0) */
  const char* before;  /* text before the generated one that is part of the constrained text; NULL:
                          none (NULL) */
  const char* behind;  /* the same after the generated text (NULL) */

  /* Of JSON. */
  const char* item_separator; /* between items and between properties (",") */
  const char* key_separator;  /* between a property's name and its value (":") */
  int32_t indent;             /* spaces per level, 0..64, with items on their own lines; -1: no line
                                 breaks (-1) */
  int32_t has_lines; /* 1: each item of an array that is the whole text has its own line (0) */
  int32_t max_depth; /* how many times a recursive schema may contain itself, or how many containers
                        may be inside each other where any value is allowed; of a grammar, how many
                        recursive references may be inside each other. 0..64; -1 (default): 3, or
                        fewer if the result would be too large for the limits */
  int32_t any_order; /* 1: the properties of an object of up to 6 are in any order; 0 (default): in
                        the schema's order */
  int32_t more_properties; /* 1: properties that a schema allows but does not name are written too;
                              0 (default): they are left out */

  /* Limits: compiling ends with INVALID_ARGUMENT if it reaches one. */
  double seconds;        /* of processor time, 0 or more (30) */
  uint64_t memory_bytes; /* that compiling may use at once, in bytes (192 MiB) */
  int64_t states;        /* of the result, 0 or more (131072) */
  int64_t edges;         /* of the result, 0 or more (4194304) */

  /* The vocabulary, for programs with their own tokenizer. */
  const char* const* tokens;    /* [token_count], the bytes of each token; an entry that is NULL is
                                   never part of a text. NULL: the bundle's vocabulary (NULL) */
  const size_t* token_sizes;    /* [token_count], in bytes (NULL) */
  size_t token_count;           /* (0) */
  int32_t vocab_size;           /* of the denoiser, 1..2^24; read only without a bundle (0) */
  const int32_t* eos_token_ids; /* [eos_count], end tokens; read only without a bundle (NULL) */
  size_t eos_count;             /* (0) */
  dlm_first_token_fn first_token; /* NULL: unknown for all texts (NULL) */
  void* user;                     /* of first_token (NULL) */

  const uint8_t* made_of; /* 32 bytes that the file keeps; NULL: zeros (NULL) */
} dlm_constraint;
DLM_API void dlm_constraint_init(dlm_constraint* constraint, size_t struct_size);

/* Compiles a constraint for a bundle. bundle may be NULL if the constraint has the vocabulary, its
 * size and the end tokens. From any thread. The first call for a bundle also indexes its
 * vocabulary, which takes about as long as reading it; so does the first call for the tokens of a
 * program. INVALID_ARGUMENT, with the place, for content that is not valid or not supported;
 * UNSUPPORTED if the bundle has no text and `tokens` is NULL.
 *
 * DLM_CONSTRAINT_COMPILED and DLM_CONSTRAINT_FILE are read and checked, not compiled: bundle may be
 * NULL, and the other fields are not read. BAD_BUNDLE for damaged data, UNSUPPORTED for a file of
 * another version, NOT_FOUND if there is no such file. */
DLM_API dlm_status dlm_automaton_compile(dlm_bundle* bundle, const dlm_constraint* constraint,
                                         char* message, size_t message_capacity,
                                         dlm_automaton** automaton);

/* The content of a file, for DLM_CONSTRAINT_COMPILED. size: the number of bytes. Only the first
 * `capacity` are written. */
DLM_API dlm_status dlm_automaton_write(const dlm_automaton* automaton, char* message,
                                       size_t message_capacity, void* data, size_t capacity,
                                       size_t* size);
DLM_API void dlm_automaton_destroy(dlm_automaton* automaton); /* running requests keep it alive */

/* Properties of an automaton. Valid as long as the automaton exists. */
typedef struct dlm_automaton_info {
  size_t struct_size;
  int32_t shortest;     /* tokens of the shortest text, 0 or more */
  int32_t states;       /* 1 or more */
  int32_t classes;      /* sets of tokens that behave alike in every state */
  int32_t groups;       /* sets of classes that lead from one state to another */
  int32_t edges;        /* pairs of states, each with the group that leads from one to the other */
  const char* warnings; /* one a line, of keywords of a schema that look misspelled and the like;
                           "" if there are none, and for one that was read */
} dlm_automaton_info;
DLM_API const dlm_automaton_info* dlm_automaton_describe(const dlm_automaton* automaton);

/* ---- Requests -------------------------------------------------------------------------------- */

/* The canvas after a step of a request. Pointers are valid until the next call on the session or,
 * in a callback, until the callback returns. */
typedef struct dlm_step {
  size_t struct_size;
  const int32_t* canvas; /* [length] */
  const int32_t* guess;  /* [length], the token that a scored, undecided position would take now; -1
                            for other positions */
  const float* score;    /* [length], its score; 0 for other positions */
  const uint8_t* undecided; /* [length], 1: the position is not decided; the canvas then has the
                               token that the denoiser sees */
  int32_t length;
  int32_t block_start, block_end; /* the block being filled: positions [start, end) */
  int32_t nfe;                    /* passes so far */
  int32_t committed;              /* positions that this step committed */
  int32_t done;     /* 1: the request has ended, and this is its last step; see dlm_result */
  const char* text; /* with DLM_TEXT_STEPS: the text that this step adds, in whole characters that
                       will not change, then NUL; otherwise "" */
  size_t text_size; /* bytes, without the NUL */
} dlm_step;

/* Called after each pass of a request, on the thread that makes the pass, and once more if the
 * request then ends without a pass. A result other than 0 ends the request with DLM_CANCELLED. In a
 * session's callback, calls on the session return INVALID_ARGUMENT, except dlm_session_cancel. A
 * scheduler's callback must not wait for a job, nor run or destroy the scheduler. */
typedef int32_t (*dlm_step_fn)(void* user, const dlm_step* step);

/* Decodes token ids, for programs with their own tokenizer. Writes at most `capacity` bytes to
 * string, and sets *size to the size of the whole text in bytes. If that is more than capacity, the
 * library calls it again with more. Any status but DLM_OK ends the request with that status. */
typedef dlm_status (*dlm_decode_fn)(void* user, const int32_t* tokens, size_t count, char* string,
                                    size_t capacity, size_t* size);

#define DLM_DEFAULT_NEW_TOKENS (-1)

/* Values of dlm_request.text. */
enum {
  DLM_TEXT_NONE = 0,   /* makes no text, unless there are stop strings */
  DLM_TEXT_RESULT = 1, /* the result has the text */
  DLM_TEXT_STEPS = 2   /* each step also has the text that it adds */
};

/* A request: what to fill, and how. Defaults are 0 and NULL, except where stated. The library
 * copies the data that it needs; the constraint may be destroyed once the request has started.
 * `user` must live until the request has ended. */
typedef struct dlm_request {
  size_t struct_size;

  /* The given tokens: set at most one of ids, a prompt and a chat. Mask tokens among the ids are
   * filled too. Prompts and chats need the bundle's text (dlm_bundle_text). */
  const int32_t* tokens;
  size_t token_count;
  const char* prompt;
  size_t prompt_size; /* bytes */
  const dlm_message* messages;
  size_t message_count;
  int32_t special_tokens; /* 1: in the prompt and in messages, the text of a special token becomes
                             that token; 0 (default): it is ordinary text */

  /* The generated tokens. */
  int32_t max_new_tokens;   /* mask tokens to add and fill, 0 or more; DLM_DEFAULT_NEW_TOKENS
                               (default): the bundle's max_new_tokens */
  const dlm_policy* policy; /* NULL (default): the bundle's default preset; for a callback bundle,
                               that of dlm_policy_init */
  int32_t steps; /* planned passes for the whole generation, split evenly over the blocks;
                    0 (default): the policy's plan */
  const dlm_automaton* constraint; /* NULL (default): any text. Otherwise the tokens from the first
                                      undecided position to the last form a text that the automaton
                                      accepts, then end tokens if there is room. This holds for
                                      every policy and however the request ends */
  int32_t constrained_tokens;      /* number of given tokens before the first undecided position
                                      that belong to the constrained text (0); they must be split as
                                      the tokenizer would split the text */

  /* When to end before everything is decided. */
  int32_t max_steps;  /* the most passes, 0 or more; 0 (default): no limit */
  double deadline_ms; /* milliseconds from the call that starts or submits the request, 0..1e12. A
                         pass that is running then is completed. 0 (default): no deadline */
  const char* const* stop_strings; /* [stop_count], not empty; the text ends before the first of
                                      these that is complete */
  size_t stop_count;

  /* Outputs. */
  int32_t text;         /* DLM_TEXT_... (DLM_TEXT_NONE) */
  int32_t text_start;   /* position where the text starts; -1 (default): after the given tokens, or
                           at 0 if max_new_tokens is 0 */
  dlm_decode_fn decode; /* NULL (default): the bundle's text */
  dlm_step_fn on_step;  /* may be NULL (default) */
  void* user;           /* for both callbacks */
} dlm_request;
DLM_API void dlm_request_init(dlm_request* request, size_t struct_size);

/* Counts and times of one request. A pass that several requests share counts for each of them, but
 * its seconds are divided among them, so the sum over requests is the elapsed time. */
typedef struct dlm_stats {
  size_t struct_size;
  int32_t nfe;            /* passes of the request: the sum of the next three */
  int32_t prefill_passes; /* passes that fill or refresh a cache: over given tokens, or a block's
                             first pass with cache "prefix" and "dual" */
  int32_t denoise_passes; /* passes that decide tokens */
  int32_t store_passes;   /* for cache "block": passes that store finished blocks */
  double prefill_s;   /* seconds in the engine, in passes that fill or refresh a cache or store */
  double passes_s;    /* seconds in the engine, in all other passes */
  double selection_s; /* seconds for scoring, ranking and committing */
  double cache_s;     /* seconds for moving keys and values between passes */
  double total_s;     /* seconds from start to end, without the program's own time. The difference
                         to the sum of the others is the loop's bookkeeping */
  uint64_t
      cache_bytes; /* the most bytes of keys and values held for the request; 0 without a cache */
} dlm_stats;

/* Why a request ended. */
enum {
  DLM_FINISH_NONE = 0,      /* it failed, see dlm_result.status */
  DLM_FINISH_STOP = 1,      /* an end token, or a stop string */
  DLM_FINISH_LENGTH = 2,    /* everything is decided, without an end token */
  DLM_FINISH_STEPS = 3,     /* it made max_steps passes */
  DLM_FINISH_DEADLINE = 4,  /* deadline_ms has passed */
  DLM_FINISH_CANCELLED = 5, /* dlm_session_cancel, dlm_job_cancel, or its scheduler was destroyed */
  DLM_FINISH_CONSTRAINT = 6 /* like LENGTH, and the text of the constraint is complete */
};

/* The result of a request. If it ended before everything was decided, each undecided position has
 * the last pass's proposal, else the first end token, or the mask token if the denoiser has no end
 * token. A constrained text is completed first. The session or job owns the result. */
typedef struct dlm_result {
  size_t struct_size;
  dlm_status status;         /* DLM_OK, or why it failed; then only message and stats are set */
  const char* message;       /* the reason; "" if it did not fail */
  int32_t finish;            /* DLM_FINISH_... */
  int32_t prompt_tokens;     /* number of given tokens */
  int32_t completion_tokens; /* number of other tokens, up to and not including the first end token,
                                or up to the stop string */
  const int32_t* tokens;     /* [length], the canvas */
  const float* log_probs;   /* [length], ln p of each token when it was committed, in the denoiser's
                               softmax without the mask token; NaN at other positions. Finite: a
                               probability that rounds to 0 gives -744.44, ln of the smallest
                               positive double */
  const uint8_t* undecided; /* [length], 1: the position was undecided when the request ended */
  size_t length;            /* of the canvas, in tokens */
  const char* text;         /* up to the first end token or stop string, then NUL; "" for
                               DLM_TEXT_NONE */
  size_t text_size;         /* bytes, without the NUL */
  int32_t is_text_decided;  /* 1: all tokens of the text, and those that end it, were decided */
  double constraint_log_prob_loss; /* nats, 0 or more: how much less likely the constraint made the
                                      text. Sums, over positions, ln p of the denoiser's best token
                                      minus ln p of the committed one, from the last pass that
                                      scored the position; at most 745 per position. Positions
                                      filled without a pass count 0. 0 without a constraint */
  const dlm_stats* stats;
} dlm_result;

/* ---- Session: requests on the caller's thread ------------------------------------------------ */

typedef struct dlm_session dlm_session;

/* Creates a session. OUT_OF_MEMORY also if the device has no room for it. */
DLM_API dlm_status dlm_session_create(dlm_bundle* bundle, char* message, size_t message_capacity,
                                      dlm_session** session);
DLM_API void dlm_session_destroy(dlm_session* session); /* not from its callbacks */

/* Why the session's last call failed; "" if it succeeded. Valid until the next call on the
 * session. */
DLM_API const char* dlm_session_last_error(const dlm_session* session);

/* Called before every pass of a session or scheduler, on the thread that makes the pass. For a
 * session, a result other than 0 ends the call with DLM_CANCELLED and drops its requests, so that a
 * program can react to a signal within one pass. It may call dlm_session_cancel. */
typedef int32_t (*dlm_before_pass_fn)(void* user);

/* Sets the session's callback until the next call of this function. NULL: no callback. */
DLM_API dlm_status dlm_session_before_pass(dlm_session* session, dlm_before_pass_fn before_pass,
                                           void* user);

/* Runs a request until it ends. *result is valid until the session starts another request; result
 * may be NULL. Returns the status of the result. An invalid request has no result. */
DLM_API dlm_status dlm_session_generate(dlm_session* session, const dlm_request* request,
                                        const dlm_result** result);

/* Runs several requests until they end, at most max_batch (1..4096) at a time. Each has its own
 * options. Requests that share a pass read the weights only once. On a CPU, all requests share
 * passes. With other engines, requests share passes if their canvases have the same length. With a
 * cache, their mask tokens must also be in the same blocks, and store must not be "reuse". At the
 * end of each block, such a request waits for the slowest. Each request gives the same result as
 * alone, except for floating-point noise of the engine. An invalid request ends the call before any
 * pass. A request that fails later ends alone. Returns the status of the first request that failed;
 * the message has its index, from 0. dlm_session_result returns the results. UNSUPPORTED if the
 * engine takes fewer at a time: "tensorrt" takes one. */
DLM_API dlm_status dlm_session_generate_batch(dlm_session* session,
                                              const dlm_request* const* requests,
                                              size_t request_count, int32_t max_batch);

/* dlm_session_generate one pass at a time: start once, then step until step->done. Starting another
 * request drops the running one. If step fails, the request has ended. */
DLM_API dlm_status dlm_session_start(dlm_session* session, const dlm_request* request);
DLM_API dlm_status dlm_session_step(dlm_session* session, const dlm_step** step);

/* Returns the result of a request that has ended. number: its index; 0, except after
 * dlm_session_generate_batch. Valid until the session starts another request. INVALID_ARGUMENT if
 * no such request has ended; otherwise DLM_OK, even if the request failed. */
DLM_API dlm_status dlm_session_result(dlm_session* session, size_t number,
                                      const dlm_result** result);

/* Ends a running request within one pass, with its current canvas: DLM_FINISH_CANCELLED. number: as
 * in dlm_session_result, or DLM_ALL_REQUESTS. Any thread may call it, and callbacks may. Does
 * nothing if no such request is running. */
#define DLM_ALL_REQUESTS SIZE_MAX
DLM_API void dlm_session_cancel(dlm_session* session, size_t number);

/* Runs one full pass over tokens [count], leaving masks as they are, and writes the raw logits
 * [row_count, V] of the given rows (0..count-1, not shifted). row_count: 1..count. capacity: floats
 * that `logits` can hold. Drops a running request. */
DLM_API dlm_status dlm_session_logits(dlm_session* session, const int32_t* tokens, size_t count,
                                      const int32_t* rows, size_t row_count, float* logits,
                                      size_t capacity);

/* Measures passes on made-up tokens and writes seconds [repeats]. Each pass runs `batch` requests
 * (1..4096), with `tokens` tokens each over `cached` cached ones, and scores `rows` rows
 * (1..tokens) of each. repeats = 0 only checks the arguments. If cached > 0, an untimed full pass
 * fills the cache first. Drops a running request. INVALID_ARGUMENT or UNSUPPORTED if the denoiser
 * or the engine cannot run such a pass. */
DLM_API dlm_status dlm_session_time_passes(dlm_session* session, int32_t batch, int32_t tokens,
                                           int32_t cached, int32_t rows, double* seconds,
                                           size_t repeats);

/* ---- Scheduler: requests from any thread, passes on one -------------------------------------- */

/* On a CPU ("onnxruntime"), all running requests share every pass: between two passes, finished
 * requests leave and waiting ones join. With other engines they take turns, pass by pass. Each
 * request gives the same result as alone, except for floating-point noise of the engine. Requests
 * start in the order of submission. Each pass prefers the requests that have waited longest. */
typedef struct dlm_scheduler dlm_scheduler;
typedef struct dlm_job dlm_job; /* a submitted request */

/* The time of a pass in milliseconds, 0 or more: a fixed part, plus parts for each token, each
 * scored row, and each pair of a token and a position it sees. `dlm-export bench --cost` measures
 * it. Has no _init function: set struct_size yourself. */
typedef struct dlm_pass_cost {
  size_t struct_size; /* sizeof(dlm_pass_cost) */
  double pass_ms, token_ms, row_ms, pair_ms;
} dlm_pass_cost;

typedef struct dlm_scheduler_options {
  size_t struct_size;
  int32_t max_running; /* the most requests running at once, 1..4096 (16) */
  int32_t
      max_waiting;    /* the most requests in the queue, 1..1048576 (1024); further ones get BUSY */
  int32_t max_tokens; /* the most tokens of a pass that several requests share, 1 or more (512).
                         Requests that do not fit take part in the next pass. A larger pass of one
                         request runs alone */
  uint64_t cache_bytes; /* bytes for keys and values of all running requests: a request starts when
                           its canvas fits. 0 (default): 1 GiB, or the longest canvas's if more */
  double max_pass_ms;   /* milliseconds, 0 or more. A request starts only if a pass over the current
                           blocks of all running requests and itself should take at most this, or
                           if no other is running. 0 (default): no limit */
  const dlm_pass_cost* cost; /* for max_pass_ms and expected_s; NULL (default): unknown. If the last
                                passes took longer than it predicts, max_pass_ms allows for that */
} dlm_scheduler_options;
DLM_API void dlm_scheduler_options_init(dlm_scheduler_options* options, size_t struct_size);

/* Creates a scheduler. options may be NULL. INVALID_ARGUMENT for max_pass_ms without a cost;
 * UNSUPPORTED for max_pass_ms if requests take turns. */
DLM_API dlm_status dlm_scheduler_create(dlm_bundle* bundle, const dlm_scheduler_options* options,
                                        char* message, size_t message_capacity,
                                        dlm_scheduler** scheduler);

/* Must not be called while dlm_scheduler_run is active. Cancels requests that have not ended; their
 * jobs stay valid. */
DLM_API void dlm_scheduler_destroy(dlm_scheduler* scheduler);

/* Submits a request. Any thread may call it. The caller destroys the job. The thread in
 * dlm_scheduler_run calls the request's callbacks until the request has ended, even if its job was
 * destroyed before. BUSY if the queue is full. INVALID_ARGUMENT also if the canvas's keys and
 * values can never fit. After dlm_scheduler_run has failed, returns its status until the next run.
 */
DLM_API dlm_status dlm_scheduler_submit(dlm_scheduler* scheduler, const dlm_request* request,
                                        char* message, size_t message_capacity, dlm_job** job);

/* Makes passes on the calling thread until dlm_scheduler_stop or, if until_idle is 1, until no
 * request is left. If before_pass (may be NULL) returns anything but 0, this call ends with
 * DLM_CANCELLED; the requests stay, and the next call continues them.
 *
 * A request that fails ends alone. If making passes itself fails (no memory, an exception from
 * before_pass), every request that has not ended gets the status and message of this call, so no
 * thread waits forever. The scheduler can be run again. INVALID_ARGUMENT if another thread is in
 * this call. */
DLM_API dlm_status dlm_scheduler_run(dlm_scheduler* scheduler, int32_t until_idle,
                                     dlm_before_pass_fn before_pass, void* user, char* message,
                                     size_t message_capacity);

/* Ends dlm_scheduler_run after the current pass. If it is not active, its next call returns at
 * once. Any thread may call it. */
DLM_API void dlm_scheduler_stop(dlm_scheduler* scheduler);

typedef struct dlm_scheduler_stats {
  size_t struct_size;
  int32_t waiting, running;             /* requests now */
  int64_t submitted, finished, refused; /* requests so far; refused: with DLM_BUSY */
  int64_t passes;                       /* passes made */
  int64_t shares;                       /* sum over passes of the requests that took part */
  double busy_s;                        /* seconds in passes and commits */
  uint64_t cache_bytes;                 /* the most bytes of keys and values held at once */
  double passes_s;                      /* seconds in passes alone */
  double expected_s; /* seconds that the cost predicts for these passes; 0 without a cost, or if
                        requests take turns */
} dlm_scheduler_stats;

/* Copies a snapshot of the statistics to *stats, of struct_size bytes. Any thread may call it. */
DLM_API void dlm_scheduler_get_stats(const dlm_scheduler* scheduler, dlm_scheduler_stats* stats,
                                     size_t struct_size);

/* Waits until the request has ended, at most timeout_ms milliseconds; timeout_ms < 0: no limit.
 * Returns 1 if it has ended, otherwise 0. */
DLM_API int32_t dlm_job_wait(const dlm_job* job, double timeout_ms);

/* Returns the result of a request that has ended; valid until its job is destroyed. Returns the
 * result's status. Before the request has ended: INVALID_ARGUMENT, and *result is NULL. */
DLM_API dlm_status dlm_job_result(const dlm_job* job, const dlm_result** result);

/* Ends the request within one pass, with its current canvas: DLM_FINISH_CANCELLED. Any thread may
 * call it, and callbacks may. */
DLM_API void dlm_job_cancel(dlm_job* job);

/* Also cancels the request if it has not ended; the current pass may then still call its callbacks.
 * To be sure that no callback follows, call dlm_job_cancel and dlm_job_wait first. A job may
 * outlive its scheduler. */
DLM_API void dlm_job_destroy(dlm_job* job);

#ifdef __cplusplus
}
#endif
#endif /* DLM_RUNTIME_H */
