// What both sources share. The host puts `enum Opcode` and `enum Format` before this text, made from programs.OPCODES
// and compiler.FORMATS, and resize.cu and colour.cu behind it. The structs are those of programs.py and compiler.py.
//
// Compile with --fmad=false (g++: -ffp-contract=off). Pillow's wheels for x86-64 round each product before they add;
// with fused multiply-add some levels would differ by one. Where torch fuses, these sources call fmaf.

typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned long long ullong;

struct Step { int code, extra; double numbers[16]; };

struct Job {
    const uchar *source;
    uchar *target;
    long long table_x, table_y;  // of a resize: where its weights are in the pool
    int source_height, source_width, height, width;
    int first, count;  // steps
    int stats;         // only valid if the first step needs statistics
    int source_base, target_base;  // used by the host alone
};

struct Stats {
    ullong grey_sum;
    uint counts[3][256];
    uchar table[3][256];  // what the step that needs the statistics makes of each level
};

struct Batch {
    const Job *jobs;
    const Step *steps;
    const float *extras;
    Stats *stats;  // zeros at the start
    int *pool;     // weights of resizes
    const uchar *scratch;  // where the results of jobs are
    int format, is_planar;  // of the outputs; planar: CHW
};

static_assert(sizeof(Step) == 136 && sizeof(Job) == 72 && sizeof(Stats) == 3848, "programs.py");

struct Pixel { int r, g, b; };

__device__ Pixel pixel_of(const uchar *levels) { return {levels[0], levels[1], levels[2]}; }

__device__ Pixel pixel_at(const Job &job, int x, int y) {
    return pixel_of(job.source + 3 * ((size_t)y * job.source_width + x));
}

__device__ int clip_to(int v, int high) { return v < 0 ? 0 : v > high ? high : v; }
