// Who gets which items: prints "right", or what was expected.
#include "threads/work_partition.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using llmbox::WorkPartition;

namespace {

void expect(bool holds, const char* what) {
    if (holds) return;
    puts(what);
    exit(0);
}

// Every item once, whoever takes it, from threads that run at the same time.
void all_once(WorkPartition& runs, int items, int threads) {
    runs.deal(items, threads);
    std::vector<std::vector<int>> taken(threads);
    std::vector<std::thread> members;
    for (int i = 0; i < threads; i++)
        members.emplace_back([&, i] {
            for (int item = runs.take(i); item >= 0; item = runs.take(i)) taken[i].push_back(item);
        });
    for (auto& member : members) member.join();
    std::vector<int> count(items);
    for (auto& list : taken)
        for (int item : list) count.at(item)++;
    for (int times : count) expect(times == 1, "every item is taken once");
    for (int i = 0; i < threads; i++) expect(runs.take(i) == -1, "nothing is left");
}

}  // namespace

int main() {
    WorkPartition runs;
    for (int threads : {1, 2, 3, 7})
        for (int items : {0, 1, 2, 5, 64, 20000})
            for (int again = 0; again < 20; again++) all_once(runs, items, threads);

    runs.deal(10, 2);
    expect(runs.first(0) == 0 && runs.first(1) == 5, "where each begins");
    for (int item = 0; item < 5; item++) expect(runs.take(0) == item, "its own run in ascending order");
    expect(runs.take(0) == 9, "then from the end of the other");
    expect(runs.take(1) == 5, "which begins where it began");

    runs.deal(12, 3);
    expect(runs.take(0) == 0 && runs.take(0) == 1 && runs.take(0) == 2 && runs.take(0) == 3, "a third");
    expect(runs.take(1) == 4, "of the second");
    expect(runs.take(0) == 11, "help goes to the longest run");

    runs.deal(3, 2);
    expect(runs.take(5) == 2, "a thread that no run was dealt to helps");
    puts("right");
}
