/* dlm_runtime.h: the C ABI of libdlm_runtime, the native runtime of dlm-export.
 *
 * The library opens a bundle (a folder that `dlm-export build` wrote) and fills canvases of mask
 * tokens with the bundle's denoiser:
 *
 *   dlm_bundle_open -> dlm_session_create -> dlm_session_generate -> read dlm_result
 *
 * A request (dlm_request) says what to fill and how. A session runs requests on the caller's
 * thread. A scheduler (dlm_scheduler) takes them from any thread and runs them on a thread of the
 * program's choice. Both give the same results (dlm_result).
 *
 * Conventions
 * - Calls that can fail return dlm_status. Results come through the trailing out-pointer, which is
 *   NULL or 0 on failure.
 * - Who creates destroys; destroying NULL does nothing. Pointers passed in are borrowed for the
 *   call, unless the comment says otherwise.
 * - Every struct that may grow starts with struct_size, and grows at its end only.
 *     Structs that the caller fills: set them up with their _init function, which takes
 *     sizeof(struct), then change fields. A struct that is larger than the library knows is refused
 *     with INVALID_ARGUMENT, because the library would ignore its last fields.
 *     Structs that the library fills belong to the library: a pointer to them is returned. Their
 *     struct_size says how many bytes are there.
 * - Integers that stand for a choice (DLM_FINISH_..., DLM_TEXT_...) may get new values. The library
 *   refuses values that it does not know; programs should expect values that they do not know.
 * - Threads: a bundle may be shared by any number of threads. A session belongs to one thread at a
 *   time, except for dlm_session_cancel. A scheduler may be shared. Each of its jobs belongs to one
 *   thread at a time, except for dlm_job_cancel. A bundle must outlive its sessions and schedulers.
 * - The library prints nothing, keeps no global state, and never calls exit. No exception leaves
 * it.
 * - Text is UTF-8. Text without a size beside it ends with NUL. Token ids are int32. A canvas is a
 *   row of token ids.
 */
#ifndef DLM_RUNTIME_H
#define DLM_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DLM_API __attribute__((visibility("default")))

/* Raised by changes that break compiled programs. A new function, or a field at the end of a struct
 * with struct_size, does not raise it. */
#define DLM_ABI_VERSION 1
DLM_API uint32_t dlm_abi_version(void);
DLM_API const char* dlm_version(void); /* such as "0.1.0"; static */

typedef int32_t dlm_status;
enum {
  DLM_OK = 0,
  DLM_INVALID_ARGUMENT =
      1,               /* the request is wrong: an id outside the vocabulary, an unknown value */
  DLM_NOT_FOUND = 2,   /* a bundle, one of its files, or a preset is missing */
  DLM_BAD_BUNDLE = 3,  /* damaged, hostile, or of a schema version that this library cannot read */
  DLM_UNSUPPORTED = 4, /* well-formed, but this library or this denoiser cannot do it */
  DLM_ENGINE_FAILED = 5, /* the inference engine reported an error, or its results are not finite */
  DLM_OUT_OF_MEMORY = 6,
  DLM_CANCELLED = 7,      /* a callback asked to stop, and the request was dropped */
  DLM_INTERNAL = 8,       /* a defect of this library; please report it with the message */
  DLM_ENGINE_MISSING = 9, /* the engine's library is missing, too old, or cannot be loaded */
  DLM_BUSY = 10           /* the scheduler's queue is full: submit the request again later */
};
DLM_API const char* dlm_status_name(dlm_status status); /* static, never NULL */

/* ---- Denoisers and passes -------------------------------------------------------------------- */

/* What the loop must know of a denoiser. Shape letters: B requests of a pass, T tokens of each, S
 * cached tokens, R scored rows, V vocabulary, K candidates per row. */
typedef struct dlm_denoiser {
  size_t struct_size;
  int32_t vocab_size;        /* V */
  int32_t mask_token_id;     /* 0..V-1 */
  int32_t max_canvas_length; /* tokens */
  int32_t layers;
  int32_t kv_heads;         /* of every layer; 0 if layers differ (read from a bundle only) */
  int32_t head_size;        /* likewise */
  int32_t top_k;            /* K: candidates that a pass returns per row, at least 2 */
  int32_t kv_element_bytes; /* 4: fp32, 2: fp16 or bf16, 1: int8 (rows then have 2 bytes more) */
  int32_t shift;            /* 1: the row of position i predicts position i + 1 */
  int32_t has_cache;        /* 1: a pass reads past and writes present keys and values */
  const int32_t* eos_token_ids; /* end tokens */
  size_t eos_count;
  int64_t visible_block;  /* n: no row sees a later block of n positions, counted from 0
                             (block-causal attention); 0: every row sees all (full attention) */
  int32_t max_new_tokens; /* of requests with DLM_DEFAULT_NEW_TOKENS; 128 by default */
} dlm_denoiser;
DLM_API void dlm_denoiser_init(dlm_denoiser* denoiser, size_t struct_size);

/* One pass of the denoiser, over the same positions of B independent canvases. The engine reads the
 * const members and fills the others. Keys and values are [B, kv_heads, rows, head_size] per layer,
 * position-encoded, with rows = S for past and rows = T for present. */
typedef struct dlm_pass {
  size_t struct_size;
  int32_t batch;               /* B: more than 1 for guided requests and batches */
  int32_t tokens;              /* T */
  int32_t cached;              /* S */
  int32_t rows;                /* R */
  int32_t layers;              /* length of the four arrays of pointers */
  const int64_t* input_ids;    /* [B, T] */
  const int64_t* position_ids; /* [B, T], absolute */
  const int64_t* score_rows;   /* [B, R], 0..T-1 */
  const void *const *past_keys, *const *past_values;
  void *const *present_keys, *const *present_values; /* NULL if the pass keeps no rows */
  int32_t* top_tokens; /* [B, R, K], best first, ties by lowest id, never the mask token */
  float* top_probs;    /* [B, R, K], softmax in fp32 without the mask token */
  float* entropy; /* [B, R], sum p ln(p + 1e-10) <= 0 without the mask token; NULL if not needed */
  float* logits;  /* [B, R, V], raw: finite, or -infinity for a token that is ruled out; NULL if
                     not needed. The mask token's logit is not read. NaN or +infinity in a row
                     ends the request with ENGINE_FAILED */
} dlm_pass;

/* Runs one pass. Any status but DLM_OK ends the requests of the pass with that status. */
typedef dlm_status (*dlm_pass_fn)(void* user, const dlm_pass* pass);

/* ---- Policy ---------------------------------------------------------------------------------- */

/* What to commit after each pass; presets of a bundle fill it, callers change fields. Values are
 * strings, so that a policy reads the same in C, in Python and in manifest.json. The strings are
 * borrowed: literals, or the bundle's own. */
typedef struct dlm_policy {
  size_t struct_size;
  const char* select;  /* "argmax" | "sample": a draw at `temperature` */
  const char* score;   /* "confidence" | "margin" | "entropy" | "random" */
  const char* commit;  /* "static" | "threshold" | "dynamic" | "factor" | "entropy_bound" |
                          "timestep" | "sequential" */
  const char* compare; /* ">" | ">=": how scores meet the threshold */
  const char*
      remask; /* "none" | "edit": a finished block's tokens may still change, see edit_threshold */
  const char* cache;    /* "none" | "prefix" | "dual", of full attention | "block", "block-dual", of
                           block-causal attention, the latter with passes over a sub-block alone */
  const char* stop;     /* "eos": blocks after one that committed eos are not run | "none" */
  int32_t block_length; /* tokens; 0: the whole generation is one block. Where attention is
                           block-causal, blocks are counted from position 0, 0 takes visible_block,
                           and any other is a multiple of it */
  int32_t steps_per_block; /* passes planned a block; 0: one a token */
  int32_t refresh;  /* of "prefix" and "dual". 0: every block starts with a full pass. N: the first
                       one does, and each later one with a pass over the N tokens before it, the
                       block decided before it at least, and what its other passes run over */
  double threshold; /* of "threshold" and "dynamic", 0..1 */
  double factor;    /* of "factor", >= 0 */
  double entropy_bound; /* of "entropy_bound", nats, >= 0 */
  double timestep_eps;  /* of "timestep", 0..1 */
  double temperature;   /* of "sample", above 0, at most 1e300: logits are divided by it; 0 for
                           "argmax" */
  uint64_t seed; /* of "random" and "sample": the same text, whatever the engine, its threads and
                    the batch, but for what floating-point noise of the engine changes */
  const char* store; /* of "block": how a finished block is stored. "pass": by one more pass over
                        it, which is exact | "open": that pass also runs the next block and decides
                        in it; the canvas is the same | "reuse": the rows of its last pass are
                        stored; some of its tokens were still masked then */
  int32_t sub_block_length; /* of block-causal attention: positions of a block that are decided
                               before the next ones; divides block_length. 0: all together */
  int32_t edit_passes;   /* of "edit": passes over a finished block, at most; the first that changes
                            nothing is the last */
  double edit_threshold; /* of "edit", 0..1: a token of a finished block changes where another one's
                            probability is above it */
  double top_p;          /* of "sample", 0..1: from as few of the best tokens as have more than this
                            probability together */
  int32_t top_k;         /* of "sample": from this many of the best tokens; 0: all */
  const char* score_of;  /* what scores are of. "prediction": the denoiser's softmax | "draw", of
                            "sample": the distribution that is drawn from, by temperature, top_p and
                            top_k | "marginal": of a constrained request the softmax of all texts
                            that the constraint has, else "prediction" */
  double cfg_scale; /* w of classifier-free guidance: each pass also runs the canvas with all that
                       is given masked, and logits are without + (w + 1)(with - without); 0: none.
                       UNSUPPORTED where the engine takes one request a pass */
} dlm_policy;
/* LLaDA's loop: static, confidence, blocks of 32, no cache. */
DLM_API void dlm_policy_init(dlm_policy* policy, size_t struct_size);

/* What the library knows of one field of dlm_policy, for tools and language bindings. */
typedef struct dlm_policy_field {
  size_t struct_size;
  const char* name;
  int32_t kind;               /* DLM_FIELD_CHOICE, ... */
  size_t offset;              /* bytes from the start of dlm_policy */
  const char* const* choices; /* of DLM_FIELD_CHOICE: its values, the default first, NULL at the
                                 end; else NULL */
  double initial;             /* of the other kinds: the default, */
  double lowest, highest;     /* and the range, both ends included */
} dlm_policy_field;
enum {
  DLM_FIELD_CHOICE = 0, /* const char* */
  DLM_FIELD_INT32 = 1,
  DLM_FIELD_DOUBLE = 2,
  DLM_FIELD_UINT64 = 3
};

/* The fields in the order of dlm_policy, counted from 0, without struct_size; NULL after the last.
 * Static. */
DLM_API const dlm_policy_field* dlm_policy_field_at(size_t index);

/* ---- Bundle ---------------------------------------------------------------------------------- */

typedef struct dlm_bundle dlm_bundle;

typedef struct dlm_open_options {
  size_t struct_size;
  const char* engine;         /* "auto" (default): "tensorrt" if the bundle was built for GPUs, else
                                 "onnxruntime" | "onnxruntime" | "tensorrt" | "none": the bundle is
                                 checked, and cannot make passes */
  const char* engine_library; /* path of libonnxruntime, libnvinfer or libtensorrt_rtx; NULL:
                                 $DLM_ONNXRUNTIME or $DLM_TENSORRT, then the system's */
  int32_t threads;            /* of onnxruntime, 0..4096; 0: all cores. At most as many as the cores
                                 that the process may use are started */
  int32_t check_hashes;   /* 1 (default): compare every file with the SHA-256 in the manifest; 0:
                             sizes only. A large file that has not changed since its hash was right
                             is not hashed again, unless $DLM_HASH_FILES is "always" (default:
                             "changed") or engine is "none" */
  const char* provider;   /* of onnxruntime: "cpu" (default) | "cuda" | "tensorrt" |
                             "nv_tensorrt_rtx"; a GPU provider makes engine "auto" onnxruntime */
  int32_t device;         /* the GPU's number for these providers, from 0, as CUDA counts */
  int32_t allow_fallback; /* 1: nodes that the provider cannot run, the CPU runs, and
                             dlm_bundle_engine names them; 0 (default): such nodes are refused by
                             name with UNSUPPORTED */
} dlm_open_options;
DLM_API void dlm_open_options_init(dlm_open_options* options, size_t struct_size);

/* Notes on engines
 *
 * "onnxruntime" on a CPU uses kernels of this library where they are faster: the first set of
 * "amx-int8", "avx512-vnni", "avx-vnni", "avx2" or "neon-dotprod" that the processor has.
 * $DLM_KERNELS names another set, or "none". Looking for "amx-int8" asks the system for permission
 * to use AMX registers: signal frames of threads that use them grow by 8 KiB.
 *
 * ONNX Runtime's official builds store a device id and send telemetry unless $ORT_DISABLE_TELEMETRY
 * is 1 before they start. Opening with engine "onnxruntime" sets it to 1 if it is not set. A
 * program whose other threads read the environment at that time should set it itself, before it
 * starts them.
 *
 * GPU providers need ONNX Runtime 1.24 or newer, built with the provider (onnxruntime-gpu), and the
 * driver ($DLM_CUDA_LIBRARY, by default libcuda.so.1). They run the bundle's graph for GPUs if it
 * has one. A session keeps its keys and values on the device.
 *
 * "tensorrt" needs a library that was compiled with TensorRT's headers. It runs on the first CUDA
 * device ($CUDA_VISIBLE_DEVICES chooses), with the bundle's engine file that was built for that
 * device and for exactly the TensorRT that it loads. If none fits, the message says why for each.
 */

/* A set of kernels. */
typedef struct dlm_kernel_set {
  const char* name;
  const char* refusal; /* why it does not run here; NULL: it does */
} dlm_kernel_set;

/* All sets for this architecture, fastest first, counted from 0; NULL after the last. Static. */
DLM_API const dlm_kernel_set* dlm_kernel_set_at(size_t index);

/* Opens the bundle in the folder `path`, checks it, and loads its engine. options may be NULL. On
 * failure the reason goes to message, of at most message_capacity bytes with its NUL; message may
 * be NULL. The same holds for every call that takes a message. */
DLM_API dlm_status dlm_bundle_open(const char* path, const dlm_open_options* options, char* message,
                                   size_t message_capacity, dlm_bundle** bundle);

/* A bundle without files, whose passes `run` makes. `user` must outlive the bundle. Calls come from
 * the threads that run sessions and schedulers, perhaps at once. */
DLM_API dlm_status dlm_bundle_from_callback(const dlm_denoiser* denoiser, dlm_pass_fn run,
                                            void* user, char* message, size_t message_capacity,
                                            dlm_bundle** bundle);
DLM_API void dlm_bundle_destroy(dlm_bundle* bundle);

/* All three belong to the bundle. manifest: the text of manifest.json; "" for a callback bundle.
 * engine: one line for people, such as "onnxruntime 1.31.1 (CPU)". */
DLM_API const dlm_denoiser* dlm_bundle_denoiser(const dlm_bundle* bundle); /* NULL for NULL */
DLM_API const char* dlm_bundle_manifest(const dlm_bundle* bundle);
DLM_API const char* dlm_bundle_engine(const dlm_bundle* bundle);

/* Fills *policy, which dlm_policy_init has set up, with a loop of the bundle. preset: its name;
 * NULL: the bundle's default. effort: NULL, or "instant", "low", "medium" or "high" (fewest passes
 * first): the tuned form of the preset that the levels were fitted for. NOT_FOUND lists the names
 * that the bundle has; INVALID_ARGUMENT for an effort with another preset than its own. */
DLM_API dlm_status dlm_bundle_policy(const dlm_bundle* bundle, const char* preset,
                                     const char* effort, char* message, size_t message_capacity,
                                     dlm_policy* policy);

/* ---- Text ------------------------------------------------------------------------------------ */

/* A tokenizer and chat template, compiled into one of the bundle's files. Token ids equal those of
 * Hugging Face tokenizers, and rendered chats those of Jinja: the build compares them, and leaves
 * the file out if they differ. Any number of threads may share one. Text has its size in bytes and
 * may hold NUL. Invalid UTF-8 is refused with INVALID_ARGUMENT. */
typedef struct dlm_text dlm_text;

/* The bundle's own, which lives as long as the bundle. It is read at the first call. UNSUPPORTED,
 * with the reason, if the bundle has none. */
DLM_API dlm_status dlm_bundle_text(dlm_bundle* bundle, char* message, size_t message_capacity,
                                   const dlm_text** text);

/* One from memory. BAD_BUNDLE for damaged data. */
DLM_API dlm_status dlm_text_read(const void* data, size_t size, char* message,
                                 size_t message_capacity, dlm_text** text);
DLM_API void dlm_text_destroy(dlm_text* text); /* not for a bundle's own */

/* Flags of dlm_text_encode and dlm_chat_encode. */
enum {
  DLM_ENCODE_PROMPT = 1, /* add the tokens that the tokenizer puts around a prompt */
  DLM_ENCODE_SPECIAL = 2 /* text that spells a special token, such as "<|eos|>", is that token;
                            otherwise it is ordinary text */
};

/* Token ids of a text. flags: a sum of DLM_ENCODE_ values. count: the number of ids. If it is more
 * than capacity, only the first `capacity` ids are written; the first call may pass 0.
 * INVALID_ARGUMENT for text that encodes to a special token without DLM_ENCODE_SPECIAL. */
DLM_API dlm_status dlm_text_encode(const dlm_text* text, const char* string, size_t size,
                                   int32_t flags, char* message, size_t message_capacity,
                                   int32_t* tokens, size_t capacity, size_t* count);

/* Text of token ids, without special tokens. U+FFFD stands for bytes that are no whole character.
 * size: the number of bytes, without a NUL. Only the first `capacity` are written. */
DLM_API dlm_status dlm_text_decode(const dlm_text* text, const int32_t* tokens, size_t count,
                                   char* message, size_t message_capacity, char* string,
                                   size_t capacity, size_t* size);

/* A message of a chat. Arrays hold them, so the struct cannot grow within an ABI version. */
typedef struct dlm_message {
  const char* role; /* "system", "user", "assistant", "tool": those of the template */
  const char* content;
  size_t content_size; /* bytes */
} dlm_message;

/* A chat as text, up to where the assistant answers. size and capacity are as in dlm_text_decode.
 * UNSUPPORTED, with the message's number and the reason, if the template needs more than putting
 * contents between fixed texts. */
DLM_API dlm_status dlm_chat_render(const dlm_text* text, const dlm_message* messages,
                                   size_t message_count, char* message, size_t message_capacity,
                                   char* string, size_t capacity, size_t* size);

/* Token ids of a chat, up to where the assistant answers. The template's special tokens become
 * tokens; those that a content spells stay ordinary text, unless flags is DLM_ENCODE_SPECIAL.
 * Prefer this call to encoding the text of dlm_chat_render, in which both look the same. count and
 * capacity are as in dlm_text_encode. */
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
  DLM_CONSTRAINT_TREE = 4         /* a tree of JSON objects with texts, expressions and schemas in
                                     sequence or as alternatives: docs/c-api.md */
};

/* The first token of a text by the program's tokenizer, or -1 if it does not know. */
typedef int32_t (*dlm_first_token_fn)(void* user, const char* string, size_t size);

/* What to compile. */
typedef struct dlm_constraint {
  size_t struct_size;
  int32_t kind; /* DLM_CONSTRAINT_... */
  const char* content;
  size_t content_size; /* bytes */
  const char* before;  /* text around the generated one that counts as part of the constrained */
  const char* behind;  /* text; NULL (default): none */

  /* Of JSON. */
  const char* item_separator; /* between items and between properties (",") */
  const char* key_separator;  /* between a property's name and its value (":") */
  int32_t indent;             /* spaces per level, with items on their own lines; -1 (default): no
                                 line breaks */
  int32_t has_lines; /* 1: each item of an array that is the whole text has its own line (0) */
  int32_t max_depth; /* how many times a recursive schema may contain itself, or how many containers
                        may be inside each other where any value is allowed; -1 (default): chosen by
                        the library */

  /* Limits: compiling ends with INVALID_ARGUMENT if it reaches one. */
  double seconds;        /* of processor time (30) */
  uint64_t memory_bytes; /* (192 MiB) */
  int64_t states, edges; /* of the result (131072, 4194304) */

  /* The vocabulary, for programs with their own tokenizer; NULL (default): the bundle's. */
  const char* const* tokens; /* [token_count], the bytes of each token; NULL: it is never part of a
                                text */
  const size_t* token_sizes; /* [token_count], in bytes */
  size_t token_count;
  int32_t vocab_size;           /* of the denoiser, and */
  const int32_t* eos_token_ids; /* [eos_count], its end tokens: of a call without a bundle */
  size_t eos_count;
  dlm_first_token_fn first_token; /* NULL: unknown for all texts */
  void* user;                     /* of first_token */

  const uint8_t* made_of; /* 32 bytes that the file keeps; NULL (default): zeros */
} dlm_constraint;
DLM_API void dlm_constraint_init(dlm_constraint* constraint, size_t struct_size);

/* Compiles a constraint for a bundle. bundle may be NULL if the constraint has the vocabulary, its
 * size and the end tokens. From any thread. The first
 * call for a bundle also indexes its vocabulary, which takes about as long as reading it.
 * INVALID_ARGUMENT, with the place, for content that is not valid or not supported; UNSUPPORTED if
 * the bundle has no text and `tokens` is NULL. */
DLM_API dlm_status dlm_automaton_compile(dlm_bundle* bundle, const dlm_constraint* constraint,
                                         char* message, size_t message_capacity,
                                         dlm_automaton** automaton);

/* Reads and checks a file that dlm_automaton_write or dlm-export compile made, or its content in
 * memory. BAD_BUNDLE for damaged data. */
DLM_API dlm_status dlm_automaton_open(const char* path, char* message, size_t message_capacity,
                                      dlm_automaton** automaton);
DLM_API dlm_status dlm_automaton_read(const void* data, size_t size, char* message,
                                      size_t message_capacity, dlm_automaton** automaton);

/* The content of a file. size: the number of bytes. Only the first `capacity` are written. */
DLM_API dlm_status dlm_automaton_write(const dlm_automaton* automaton, char* message,
                                       size_t message_capacity, void* data, size_t capacity,
                                       size_t* size);
DLM_API void dlm_automaton_destroy(dlm_automaton* automaton); /* running requests keep it alive */

/* What is known of an automaton. Valid as long as the automaton. */
typedef struct dlm_automaton_info {
  size_t struct_size;
  int32_t shortest; /* tokens of the shortest text */
  int32_t states, classes, groups, edges;
  const char* warnings; /* one a line, of keywords of a schema that look misspelled and the like;
                           "" if there are none, and for one that was read */
} dlm_automaton_info;
DLM_API const dlm_automaton_info* dlm_automaton_describe(const dlm_automaton* automaton);

/* ---- Requests -------------------------------------------------------------------------------- */

/* The canvas after a step of a request. Pointers are valid until the next call on the session, or,
 * in a callback, until the callback returns. */
typedef struct dlm_step {
  size_t struct_size;
  const int32_t* canvas; /* [length] */
  const int32_t* guess;  /* [length], the token that a scored, undecided position would take now; -1
                            elsewhere */
  const float* score;    /* [length], its score; 0 elsewhere */
  const uint8_t* undecided; /* [length], 1 where a token is still wanted. What the canvas holds
                               there is what the denoiser sees */
  int32_t length;
  int32_t block_start, block_end; /* the block being filled, [start, end) */
  int32_t nfe;                    /* passes so far */
  int32_t committed;              /* positions that this step committed */
  int32_t done;     /* 1: the request has ended, see dlm_result; this is its last step */
  const char* text; /* with DLM_TEXT_STEPS: what this step adds to the text, in whole characters
                       that will not change, followed by NUL; else "" */
  size_t text_size; /* bytes */
} dlm_step;

/* Called after each pass of a request, on the thread that makes the pass, and once more if the
 * request then ends without a pass. Anything but 0 ends the request with DLM_CANCELLED. A callback
 * of a session may call dlm_session_cancel; other calls on the session return INVALID_ARGUMENT. A
 * callback of a scheduler must not wait for a job, nor run or destroy the scheduler. */
typedef int32_t (*dlm_step_fn)(void* user, const dlm_step* step);

/* Text of token ids, for programs with their own tokenizer: writes at most `capacity` bytes to
 * string, and the whole number of bytes to size. If that is more than capacity, it is called again.
 * Any status but DLM_OK ends the request with that status. */
typedef dlm_status (*dlm_decode_fn)(void* user, const int32_t* tokens, size_t count, char* string,
                                    size_t capacity, size_t* size);

#define DLM_DEFAULT_NEW_TOKENS (-1)

/* Values of dlm_request.text. */
enum {
  DLM_TEXT_NONE = 0,   /* no text is made, unless there are stop strings */
  DLM_TEXT_RESULT = 1, /* the result has the text */
  DLM_TEXT_STEPS = 2   /* steps have it too, piece by piece */
};

/* What to fill, and how. The library copies what it needs; `constraint` may be destroyed once the
 * request has started. `user` must live until the request has ended. */
typedef struct dlm_request {
  size_t struct_size;

  /* What is given: token ids, or a prompt, or a chat. Mask tokens among the ids are filled too.
   * Prompts and chats need the bundle's text (dlm_bundle_text). */
  const int32_t* tokens;
  size_t token_count;
  const char* prompt;
  size_t prompt_size; /* bytes */
  const dlm_message* messages;
  size_t message_count;
  int32_t special_tokens; /* 1: text of the prompt or of a message that spells a special token is
                             that token; 0: it is ordinary text */

  /* What is filled. */
  int32_t max_new_tokens;   /* mask tokens that are added and filled, 0 or more;
                               DLM_DEFAULT_NEW_TOKENS (default): the bundle's number */
  const dlm_policy* policy; /* NULL: the bundle's default preset; for a callback bundle,
                               dlm_policy_init's */
  int32_t steps; /* passes planned for the whole generation, split evenly over the blocks;
                    0: the policy's plan */
  const dlm_automaton* constraint; /* NULL: any text. Else the tokens from the first undecided
                                      position to the last form a text that the automaton accepts,
                                      followed by end tokens if there is room, whatever the policy
                                      and whatever ends the request */
  int32_t constrained_tokens;      /* given tokens before the first undecided position that are the
                                      text's first ones, as the tokenizer would split the text */

  /* When it ends before everything is decided. */
  int32_t max_steps;  /* passes; 0: any number */
  double deadline_ms; /* milliseconds from the call that starts or submits it. The pass that runs
                         then is the last; 0: no deadline */
  const char* const* stop_strings; /* the text ends before the first of these that is complete */
  size_t stop_count;

  /* What is told. */
  int32_t text;         /* DLM_TEXT_NONE, ... */
  int32_t text_start;   /* position where the text starts; -1 (default): after the given tokens, or
                           at 0 if max_new_tokens is 0 */
  dlm_decode_fn decode; /* NULL: the bundle's text */
  dlm_step_fn on_step;  /* may be NULL */
  void* user;           /* of both callbacks */
} dlm_request;
DLM_API void dlm_request_init(dlm_request* request, size_t struct_size);

/* Counts and times of one request. A pass that several requests share counts as a pass of each, and
 * its seconds are divided among them, so that the sum over requests is the time that went by. */
typedef struct dlm_stats {
  size_t struct_size;
  int32_t nfe;            /* passes that the request took part in: the sum of the next three */
  int32_t prefill_passes; /* that fill or refresh a cache: given tokens, or a block's first pass
                             with cache "prefix" and "dual" */
  int32_t denoise_passes; /* that decide tokens */
  int32_t store_passes;   /* of cache "block": over finished blocks, to store them */
  double prefill_s;     /* seconds in the engine, in passes that fill or refresh a cache or store */
  double passes_s;      /* seconds in the engine, in all other passes */
  double selection_s;   /* seconds of scoring, ranking and committing */
  double cache_s;       /* seconds of moving keys and values between passes */
  double total_s;       /* seconds from start to end, without the program's own time. It exceeds the
                           sum of the others by the loop's bookkeeping */
  uint64_t cache_bytes; /* keys and values held for the request, at most; 0 without a cache */
} dlm_stats;

/* Why a request ended. */
enum {
  DLM_FINISH_NONE = 0,      /* it failed, see dlm_result.status */
  DLM_FINISH_STOP = 1,      /* an end token, or a stop string */
  DLM_FINISH_LENGTH = 2,    /* everything is decided, without an end token */
  DLM_FINISH_STEPS = 3,     /* max_steps passes were made */
  DLM_FINISH_DEADLINE = 4,  /* deadline_ms went by */
  DLM_FINISH_CANCELLED = 5, /* dlm_session_cancel, dlm_job_cancel, or its scheduler was destroyed */
  DLM_FINISH_CONSTRAINT = 6 /* as LENGTH, and the text of the constraint is complete */
};

/* What came of a request. If it ended before everything was decided, undecided positions hold what
 * the last pass proposed for them, else the first end token, or the mask token if the denoiser has
 * no end token. A constrained text is completed first. */
typedef struct dlm_result {
  size_t struct_size;
  dlm_status status;     /* DLM_OK, or why it failed: only message and stats are then meaningful */
  const char* message;   /* the reason; "" if it did not fail */
  int32_t finish;        /* DLM_FINISH_... */
  int32_t prompt_tokens; /* given tokens */
  int32_t completion_tokens; /* other tokens, up to and without the first end token, or up to where
                                a stop string was found */
  const int32_t* tokens;     /* [length], the canvas */
  const float* log_probs;    /* [length], ln p of a token when it was committed, by the denoiser's
                                softmax without the mask token; NaN at other positions. Never
                                infinite: a probability that rounds to 0 gives -744.44, ln of the
                                smallest positive double */
  const uint8_t* undecided;  /* [length], 1: the token was not decided when the request ended */
  size_t length;
  const char* text;        /* up to the first end token or stop string, followed by NUL; "" for
                              DLM_TEXT_NONE */
  size_t text_size;        /* bytes */
  int32_t is_text_decided; /* 1: all tokens of the text, and what ends it, were decided */
  double constraint_log_prob_loss; /* nats, 0 or more: how much less likely the constraint made the
                                      text. The sum over positions of ln p of the denoiser's best
                                      token minus ln p of the committed one, by the last pass that
                                      scored the position; at most 745 per position. Positions that
                                      were filled before a pass scored them count 0. 0 without a
                                      constraint */
  const dlm_stats* stats;
} dlm_result;

/* ---- Session: requests on the caller's thread ------------------------------------------------ */

typedef struct dlm_session dlm_session;

DLM_API dlm_status dlm_session_create(dlm_bundle* bundle, char* message, size_t message_capacity,
                                      dlm_session** session);
DLM_API void dlm_session_destroy(dlm_session* session); /* not from its callbacks */

/* The reason of the session's last failure; "" if the last call succeeded. Valid until the next
 * call on the session. */
DLM_API const char* dlm_session_last_error(const dlm_session* session);

/* Called before every pass that the session makes, on the calling thread. Anything but 0 ends the
 * call with DLM_CANCELLED and drops its requests, so that a signal is seen within one pass. It may
 * call dlm_session_cancel. */
typedef int32_t (*dlm_before_pass_fn)(void* user);

/* Holds until the next call of this; NULL: no callback. */
DLM_API dlm_status dlm_session_before_pass(dlm_session* session, dlm_before_pass_fn before_pass,
                                           void* user);

/* Runs a request to its end. The result is valid until the session starts another request; it may
 * be NULL. Returns the status of the result. A wrong request has no result. */
DLM_API dlm_status dlm_session_generate(dlm_session* session, const dlm_request* request,
                                        const dlm_result** result);

/* Runs several requests to their ends, at most max_batch (1..4096) at a time, each with its own
 * options. They share passes, and thus the reading of weights. On a CPU all kinds of requests do.
 * With other engines those do whose canvases have the same length and, over a cache, whose masks
 * lie in the same blocks (never with store "reuse"); a request then waits at the end of each block
 * for the slowest. Each request gets the same result as alone, except for floating-point noise of
 * the engine. A wrong request stops the call before any pass; one that fails later fails alone.
 * Returns the status of the first request that failed; the message names it by its number, counted
 * from 0. dlm_session_result has the results. UNSUPPORTED if the engine takes fewer at a time:
 * "tensorrt" takes one. */
DLM_API dlm_status dlm_session_generate_batch(dlm_session* session,
                                              const dlm_request* const* requests,
                                              size_t request_count, int32_t max_batch);

/* dlm_session_generate one pass at a time: start once, then step until step->done. Starting again
 * drops the running request. If step fails, the request has ended. */
DLM_API dlm_status dlm_session_start(dlm_session* session, const dlm_request* request);
DLM_API dlm_status dlm_session_step(dlm_session* session, const dlm_step** step);

/* The result of a request that has ended, by its number: 0, except after
 * dlm_session_generate_batch. Valid until the session starts another request. INVALID_ARGUMENT if
 * no such request has ended; else DLM_OK, also for a request that failed. */
DLM_API dlm_status dlm_session_result(dlm_session* session, size_t number,
                                      const dlm_result** result);

/* Ends a running request within one pass with what it has: DLM_FINISH_CANCELLED. number: as of
 * dlm_session_result, or DLM_ALL_REQUESTS. From any thread, also from callbacks. Does nothing if no
 * such request runs. */
#define DLM_ALL_REQUESTS SIZE_MAX
DLM_API void dlm_session_cancel(dlm_session* session, size_t number);

/* One full pass over tokens [count], whose masks stay masked: raw logits [row_count, V] of the
 * given rows, into logits, whose capacity counts floats. Rows are not shifted. Drops a running
 * request. */
DLM_API dlm_status dlm_session_logits(dlm_session* session, const int32_t* tokens, size_t count,
                                      const int32_t* rows, size_t row_count, float* logits,
                                      size_t capacity);

/* For measuring: the seconds [repeats] of passes of `batch` requests, each with `tokens` over
 * `cached` ones and `rows` of them scored, on made-up tokens (repeats = 0 checks only). For cached
 * > 0 a full pass fills the cache first, untimed. Drops a running request. INVALID_ARGUMENT or
 * UNSUPPORTED if the denoiser or the engine does not take such a pass. */
DLM_API dlm_status dlm_session_time_passes(dlm_session* session, int32_t batch, int32_t tokens,
                                           int32_t cached, int32_t rows, double* seconds,
                                           size_t repeats);

/* ---- Scheduler: requests from any thread, passes on one -------------------------------------- */

/* On a CPU ("onnxruntime") all running requests share every pass: between two passes, finished
 * requests leave and waiting ones join. With other engines they take turns, pass by pass. Each gets
 * the same result as alone, except for floating-point noise of the engine. Requests start in the
 * order of submission. A pass takes first those that have waited longest for one. */
typedef struct dlm_scheduler dlm_scheduler;
typedef struct dlm_job dlm_job; /* a submitted request */

/* Milliseconds that a pass takes: a fixed part, and parts for each token, each scored row, and each
 * pair of a token and a position that it sees. `dlm-export bench --cost` measures it. */
typedef struct dlm_pass_cost {
  size_t struct_size; /* sizeof(dlm_pass_cost) */
  double pass_ms, token_ms, row_ms, pair_ms;
} dlm_pass_cost;

typedef struct dlm_scheduler_options {
  size_t struct_size;
  int32_t max_running; /* requests that have started, 1..4096 (16) */
  int32_t max_waiting; /* requests that have not (1024); more are refused with DLM_BUSY */
  int32_t max_tokens;  /* of a pass that several requests share (512). Requests without room take
                          part in the next pass. A larger pass of one request runs alone */
  uint64_t
      cache_bytes;    /* keys and values of all running requests: a request starts when there is
                         room for its canvas. 0: 1 GiB, or what the longest canvas takes if more */
  double max_pass_ms; /* a request starts only if a pass over the blocks of all running requests
                         and its own is expected to take at most this long, or if no other runs.
                         0: any time */
  const dlm_pass_cost* cost; /* what max_pass_ms and expected_s are computed by; NULL: unknown. If
                                the last passes took longer than that, max_pass_ms allows for it */
} dlm_scheduler_options;
DLM_API void dlm_scheduler_options_init(dlm_scheduler_options* options, size_t struct_size);

/* options may be NULL. INVALID_ARGUMENT for max_pass_ms without a cost; UNSUPPORTED for max_pass_ms
 * if requests take turns. */
DLM_API dlm_status dlm_scheduler_create(dlm_bundle* bundle, const dlm_scheduler_options* options,
                                        char* message, size_t message_capacity,
                                        dlm_scheduler** scheduler);

/* Must not be called while dlm_scheduler_run is active. Cancels requests that have not ended; their
 * jobs stay valid. */
DLM_API void dlm_scheduler_destroy(dlm_scheduler* scheduler);

/* Submits a request from any thread. Its callbacks run on the thread that makes the passes, until
 * the request has ended, also if its job was destroyed before. BUSY if the queue is full;
 * INVALID_ARGUMENT also for a canvas whose keys and values can never fit. After dlm_scheduler_run
 * has failed, this returns its status until the next run. */
DLM_API dlm_status dlm_scheduler_submit(dlm_scheduler* scheduler, const dlm_request* request,
                                        char* message, size_t message_capacity, dlm_job** job);

/* Makes passes on the calling thread until dlm_scheduler_stop or, if until_idle is 1, until no
 * request is left. If before_pass (may be NULL) returns anything but 0, this ends with
 * DLM_CANCELLED, and the next call goes on.
 *
 * A request that fails, fails alone. If making passes itself fails (no memory, an exception from
 * before_pass), every request that has not ended gets the status and message that this call
 * returns, so that no thread waits forever. The scheduler can be run again. INVALID_ARGUMENT if
 * another thread is in this call. */
DLM_API dlm_status dlm_scheduler_run(dlm_scheduler* scheduler, int32_t until_idle,
                                     dlm_before_pass_fn before_pass, void* user, char* message,
                                     size_t message_capacity);

/* Ends dlm_scheduler_run after the current pass, or the next call of it at once. From any thread.
 */
DLM_API void dlm_scheduler_stop(dlm_scheduler* scheduler);

typedef struct dlm_scheduler_stats {
  size_t struct_size;
  int32_t waiting, running;             /* requests now */
  int64_t submitted, finished, refused; /* requests so far; refused with DLM_BUSY */
  int64_t passes;                       /* made */
  int64_t shares;                       /* sum over passes of the requests that took part */
  double busy_s;                        /* seconds in passes and commits */
  uint64_t cache_bytes;                 /* keys and values held at once, at most */
  double passes_s;                      /* seconds in passes alone */
  double expected_s; /* seconds expected for these by the cost; 0 without one, or if requests take
                        turns */
} dlm_scheduler_stats;

/* Copies a snapshot of the statistics, of struct_size bytes. From any thread. */
DLM_API void dlm_scheduler_get_stats(const dlm_scheduler* scheduler, dlm_scheduler_stats* stats,
                                     size_t struct_size);

/* Waits until the request has ended; timeout_ms < 0: without limit. Returns 1 if it has. */
DLM_API int32_t dlm_job_wait(const dlm_job* job, double timeout_ms);

/* The result of a request that has ended, valid until its job is destroyed. Returns its status;
 * INVALID_ARGUMENT and NULL before it has ended. */
DLM_API dlm_status dlm_job_result(const dlm_job* job, const dlm_result** result);

/* Ends it within one pass with what it has: DLM_FINISH_CANCELLED. From any thread, also from
 * callbacks. */
DLM_API void dlm_job_cancel(dlm_job* job);

/* Cancels it too if it has not ended: the current pass may still call its callbacks. To be sure
 * that no callback follows, call dlm_job_cancel and dlm_job_wait first. It may outlive its
 * scheduler. */
DLM_API void dlm_job_destroy(dlm_job* job);

#ifdef __cplusplus
}
#endif
#endif /* DLM_RUNTIME_H */
