-- The longest waits, and for whom. For traces that msplit writes: trace_processor -q trace_waits.sql trace.json
WITH kernel AS (
  SELECT slice.id, slice.name, slice.ts, slice.ts + slice.dur AS over, thread.name AS stream, process.name AS run,
    COALESCE(LAG(slice.ts + slice.dur) OVER (PARTITION BY thread.utid ORDER BY slice.ts), MIN(slice.ts) OVER (PARTITION BY process.upid)) AS free
  FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
  WHERE slice.category = 'kernel')
SELECT after.run, after.stream, after.name AS kernel, MAX(MIN(before.over, after.ts) - after.free) / 1e3 AS us, before.name AS waits_for, before.stream AS of_stream
FROM flow JOIN kernel AS after ON flow.slice_in = after.id JOIN kernel AS before ON flow.slice_out = before.id
GROUP BY after.id HAVING us > 0 ORDER BY us DESC LIMIT 20;
